"""The same pixels under other dims, joined or among other channels, against one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import SpatialTensor, UnsupportedSpatialOp, shard
from tests.mpi.device import DEVICE
from tests.mpi.equality import (
    Operation,
    check,
    check_keyed,
    close,
    drawn,
    parameter,
    seeds,
    several_ranks,
    some_meshes,
)
from tests.mpi.spatial.shared import Cases, tokens

N, C, H, W = 2, 4, 12, 8
PLAIN, ODD = (N, C, H, W), (2, 5, 7, 6)


def windows(x: Tensor, size: int) -> Tensor:
    """Swin's: (N, H, W, C) to (N * windows, size * size, C)."""
    samples, height, width, channels = x.shape
    x = x.view(samples, height // size, size, width // size, size, channels)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size * size, channels)


def image_of(windows: Tensor, size: int, height: int, width: int) -> Tensor:
    x = windows.view(-1, height // size, width // size, size, size, windows.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, height, width, windows.shape[-1])


VIEWS: dict[str, Operation] = {
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "mT": lambda x: x.mT,
    "T": lambda x: x.T,
    "tokens and back": lambda x: (
        x.flatten(2).transpose(1, 2).relu().transpose(1, 2).reshape(N, C, H, W).sigmoid()
    ),
    "flatten channels too": lambda x: x.flatten(1),
    "flatten everything": lambda x: x.flatten(),
    "reshape with one left open": lambda x: x.reshape(N, 2, -1, H, W),
    "view_as": lambda x: x.view(N * C, 1, H, W).view_as(x),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "samples among the tokens": lambda x: x.permute(0, 2, 3, 1).reshape(-1, C),
    "and out of them": lambda x: x.permute(0, 2, 3, 1).reshape(-1, C).tanh().view(N, H, W, C),
    "columns as samples": lambda x: x.permute(0, 3, 2, 1).reshape(N * W, H, C),
    "windows and back": lambda x: (
        x.permute(0, 2, 3, 1) + image_of(windows(x.permute(0, 2, 3, 1), 2).exp(), 2, H, W)
    ),
    "patches": lambda x: x.reshape(N, C, H // 3, 3, W // 2, 2).transpose(3, 4).flatten(4),
    "pixels and channels": lambda x: x.permute(0, 2, 3, 1).flatten(1),
    "pixels and samples": lambda x: x.permute(2, 3, 0, 1).reshape(H * W * N, C),
    "unsqueeze between": lambda x: x.unsqueeze(3).unsqueeze(0),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1, H, W),
    "expand_as": lambda x: x.unsqueeze(0).expand_as(x.expand(3, N, C, H, W)),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, N, C, H, W)),
    "repeat": lambda x: x.repeat(1, 3, 1, 1),
    "tile": lambda x: x.tile(2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(3, dim=1),
}


BY_NAME = {
    "size": lambda x: x.view(size=(N, 2, 2, H, W)),
    "shape": lambda x: torch.reshape(input=x, shape=(N, C, H * W)),
    "dims": lambda x: x.permute(dims=(0, 2, 3, 1)).flip(dims=(2,)),
    "sizes": lambda x: x[:, :1].expand(size=(N, C, H, W)).unflatten(dim=1, sizes=(2, -1)),
    "repeats": lambda x: x.repeat(repeats=(1, 2, 1, 1)),
    "axes": lambda x: x.swapaxes(axis0=1, axis1=2).transpose(dim0=0, dim1=1),
    "places": lambda x: x.movedim(source=1, destination=3).roll(shifts=3, dims=2),
}


def complex_of(x: Tensor) -> Tensor:
    return x[:, :2] + 1j * x[:, 2:]


def turned(z: Tensor, angles: Tensor) -> Tensor:
    """As rotary embeddings."""
    pairs = torch.view_as_complex(torch.view_as_real(z))
    return torch.view_as_real(pairs * torch.exp(1j * angles)[:, None, None]).sum(-1)


COMPLEX = {
    "product": lambda x, w: (complex_of(x) * torch.exp(1j * w)[:, None, None]).abs(),
    "conjugate": lambda x, w: (complex_of(x).conj() * (1 + 2j)).imag * w[:, None, None],
    "mean": lambda x, w: (complex_of(x).mean((2, 3)) * (w + 1j)).abs(),
    "pairs": lambda x, w: turned(complex_of(x), w),
    "convolution": lambda x, w: F.conv2d(
        complex_of(x), (w + 1j * w.flip(0)).expand(3, 5, 3, 2).transpose(1, 3), padding=(1, 2)
    ).abs(),
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_values(name: str, meshes: dict) -> None:
    check_keyed(COMPLEX[name], PLAIN, [(2,)], meshes, name)


@pytest.mark.tiles
@pytest.mark.parametrize("name", BY_NAME)
def test_arguments_by_the_names_of_pytorch(name: str, meshes: dict) -> None:
    check_keyed(BY_NAME[name], PLAIN, [], meshes, name)


@pytest.mark.tiles
@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str, meshes: dict) -> None:
    check_keyed(VIEWS[name], PLAIN, [], meshes, name)
    if "view" not in name:
        last = drawn(0, *PLAIN).contiguous(memory_format=torch.channels_last)
        check(VIEWS[name], last, [], meshes, f"{name}, channels last")


ONE_PIXEL: dict[str, Operation] = {
    "flatten": lambda x: x.flatten(1),
    "squeeze both": lambda x: x.squeeze((2, 3)),
    "tokens": tokens,
    "permute and view": lambda x: x.permute(0, 2, 3, 1).reshape(N, C),
}
MIXED: dict[str, Operation] = {
    "tokens as channels": lambda x: tokens(x).reshape(x.shape),
    "and back": lambda x: tokens(x.reshape(2, 42, 5)).sin().reshape(2, 42, 5).mT,
    "samples and pixels": lambda x: x.permute(2, 3, 0, 1).reshape(x.shape),
    "more dims": lambda x: tokens(x).reshape(2, 1, 5, 1, 7, 6),
    "few channels": lambda x: x[:, :1].permute(0, 3, 2, 1).reshape(2, 1, 7, 6),
    "empty tiles": lambda x: tokens(F.max_pool2d(x, 3)).reshape(2, 5, 2, 2),
}
"""Views that mix pixels with channels: ranks exchange elements."""


def attention_of_all_pairs(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights of all pairs are divided by their sum; the result is read as if channels came first.

    So does the decoder of MA-Net (Fan et al., 2020).
    """
    keys = F.conv2d(x, k).flatten(2)
    queries, values = tokens(F.conv2d(x, q)), tokens(F.conv2d(x, v, padding=1))
    weights = torch.matmul(queries, keys).view(2, -1).softmax(1).view(2, 42, 42)
    return x + torch.matmul(weights, values).reshape(x.shape)


def written(x: Tensor) -> Tensor:
    """Into a view whose base is gone."""
    x = (x * 1).permute(0, 2, 3, 1)
    return x.relu_() * 2


def unet(x: Tensor, weight: Tensor) -> Tensor:
    """An upsampled map meets its skip, of an odd size (Ronneberger et al., 2015)."""
    low = F.max_pool2d(F.conv2d(x, weight, None, 1, 1), 2)
    up = F.interpolate(low.sin(), scale_factor=2, mode="bilinear")
    rows, cols = (x.shape[dim] - up.shape[dim] for dim in (2, 3))
    return torch.cat([x, F.pad(up, (0, cols, 0, rows))], 1)


CASES: Cases = {
    **{  # what a pooling over everything gives is an image still; a dense head comes after it
        f"{name} of one pixel": (lambda x, v=view: v(F.avg_pool2d(x, (H, W))), PLAIN, [])
        for name, view in ONE_PIXEL.items()
    },
    **{name: (view, ODD, []) for name, view in MIXED.items()},
    "attention of all pairs": (
        attention_of_all_pairs,
        ODD,
        [(3, 5, 1, 1), (3, 5, 1, 1), (5, 5, 3, 3)],
    ),
    "written": (written, PLAIN, []),
    "a skip": (unet, (2, 3, 13, 11), [(3, 3, 3, 3)]),
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, meshes: dict) -> None:
    check_keyed(*CASES[name], meshes, name)


def test_each_rank_holds_its_share_of_a_view_that_mixes_pixels(meshes: dict) -> None:
    for mesh in several_ranks(meshes):
        image = shard(torch.rand(ODD).to(DEVICE), mesh)
        view = MIXED["tokens as channels"](image)
        assert isinstance(view, SpatialTensor)
        assert view.to_local().shape == image.to_local().shape


@pytest.mark.parametrize(
    "view", [MIXED["tokens as channels"], lambda x: x.view(*ODD[:3], 2, 3)], ids=["mixed", "view"]
)
def test_where_elements_moved_a_view_is_not_written_into_while_its_base_lives(
    view: Operation, meshes: dict
) -> None:
    for mesh in several_ranks(meshes):
        x = shard(torch.rand(ODD).to(DEVICE), mesh)
        y = view(x)
        with pytest.raises(UnsupportedSpatialOp, match="clone"):
            y.add_(1)
        del x


def windows_of_volumes(x: Tensor) -> Tensor:
    """(N, C, D, H, W) as (N * windows, 8, C)."""
    n, c, d, h, w = x.shape
    parts = x.permute(0, 2, 3, 4, 1).reshape(n, d // 2, 2, h // 2, 2, w // 2, 2, c)
    return parts.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, 8, c)


def volume_of(windows: Tensor, size: tuple[int, ...]) -> Tensor:
    d, h, w = (n // 2 for n in size)
    parts = windows.view(-1, d, h, w, 2, 2, 2, windows.shape[-1])
    return parts.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(-1, windows.shape[-1], *size)


VOLUMES: dict[str, Operation] = {
    "tokens and back": lambda x: x.flatten(2).transpose(1, 2).exp().mT.reshape(x.shape),
    "slices as frames": lambda x: x.transpose(1, 2).flatten(0, 1),
    "two dims merged": lambda x: x.flatten(3).exp().unflatten(3, x.shape[3:]),
    "windows and back": lambda x: volume_of(windows_of_volumes(x).exp(), x.shape[2:]),
    "means of windows": lambda x: x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).mean((4, 6)),
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", VOLUMES)
def test_views_of_volumes(name: str) -> None:
    image = parameter(random.Random(3), 2, 4, 6, 8, 12)
    check(VOLUMES[name], image, [], some_meshes(3), name)


# --- joined with each other, and with whole ones

JOINS: dict[str, Operation] = {
    "channels": lambda x, w: torch.cat([x, x.sin()], 1),
    "with a whole": lambda x, w: torch.cat([x, w], 1),
    "another layout": lambda x, w: torch.cat([x, x[:, :, 2:].sin(), x[..., :-2, :]][1:], 1),
    "rows": lambda x, w: torch.cat([x, x.sin()], 2),
    "rows of other sizes": lambda x, w: torch.cat([x[:, :, 3:].sin(), x, x[:, :, :1]], 2),
    "rows of NHWC": lambda x, w: torch.cat([x.permute(0, 2, 3, 1), w.permute(0, 2, 3, 1)], 1),
    "tokens": lambda x, w: torch.cat([x.flatten(2), w.flatten(2).sin()], 1),
    "stack at the end": lambda x, w: torch.stack((x, x * 2), dim=-1),
    "stack between": lambda x, w: torch.stack((x, x.sin(), w), 3),
    "dstack": lambda x, w: torch.dstack([x, w]),
}


@pytest.mark.tiles
@pytest.mark.parametrize("seed", seeds(1, 20))
@pytest.mark.parametrize("name", JOINS)
def test_join(name: str, seed: int, meshes: dict) -> None:
    rng = random.Random(seed)
    shape = 2, 3, rng.randint(5, 12), rng.randint(4, 12)
    image, whole = parameter(rng, *shape), parameter(rng, *shape)

    def join(x: Tensor, whole: Tensor) -> Tensor:
        return JOINS[name](x, whole) + whole.sum()

    check(join, image, [whole], meshes, f"{name} of {shape}")


def test_types_are_promoted_and_labels_joined(meshes: dict) -> None:
    labels = torch.arange(2 * 3 * 7 * 5).view(2, 3, 7, 5)
    for mesh in meshes.values():
        x, y = shard(labels, mesh), shard(labels.to(torch.float32), mesh)
        for dim in range(4):
            joined = torch.cat([x, y], dim)
            assert joined.dtype == torch.float32
            close(joined.full_tensor(), torch.cat([labels, labels.float()], dim), f"{dim}")
