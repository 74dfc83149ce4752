"""The same pixels under other dims: permuted, merged into tokens, cut into windows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import Mesh, UnsupportedSpatialOp, shard
from tests.mpi.equality import check, check_in, every_mesh, parameter, several_ranks

N, C, H, W = 2, 4, 12, 8


def windows(x: Tensor, size: int) -> Tensor:
    """Swin's: (N, H, W, C) to (N * windows, size * size, C)."""
    samples, height, width, channels = x.shape
    x = x.view(samples, height // size, size, width // size, size, channels)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size * size, channels)


def image_of(windows: Tensor, size: int, height: int, width: int) -> Tensor:
    x = windows.view(-1, height // size, width // size, size, size, windows.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, height, width, windows.shape[-1])


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute, a tuple": lambda x: torch.permute(x, (3, 0, -1 - 1, 1)),
    "transpose": lambda x: x.transpose(1, -1),
    "swapaxes": lambda x: torch.swapaxes(x, 0, 2),
    "movedim": lambda x: x.movedim(1, -1),
    "movedim, several": lambda x: torch.movedim(x, (0, 1), (-1, 0)),
    "mT": lambda x: x.mT,
    "mH": lambda x: x.mH,
    "adjoint": lambda x: x.adjoint(),
    "T": lambda x: x.T,
    "flatten into tokens": lambda x: x.flatten(2),
    "tokens last": lambda x: x.flatten(2).transpose(1, 2),
    "tokens and back": lambda x: (
        x.flatten(2).transpose(1, 2).relu().transpose(1, 2).reshape(N, C, H, W).sigmoid()
    ),
    "flatten channels too": lambda x: x.flatten(1),
    "flatten everything": lambda x: x.flatten(),
    "ravel": torch.ravel,
    "reshape with one left open": lambda x: x.reshape(N, 2, -1, H, W),
    "view": lambda x: x.view(N * C, H, W),
    "view_as": lambda x: x.view(N * C, 1, H, W).view_as(x),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "nn.Unflatten": nn.Unflatten(1, (-1, 2)),
    "samples among the tokens": lambda x: x.permute(0, 2, 3, 1).reshape(-1, C),
    "and out of them": lambda x: x.permute(0, 2, 3, 1).reshape(-1, C).tanh().view(N, H, W, C),
    "rows as samples": lambda x: x.permute(0, 2, 3, 1).reshape(N * H, W, C),
    "columns as samples": lambda x: x.permute(0, 3, 2, 1).reshape(N * W, H, C),
    "windows": lambda x: windows(x.permute(0, 2, 3, 1), 4),
    "windows and back": lambda x: (
        x.permute(0, 2, 3, 1) + image_of(windows(x.permute(0, 2, 3, 1), 2).exp(), 2, H, W)
    ),
    "patches": lambda x: x.reshape(N, C, H // 3, 3, W // 2, 2).transpose(3, 4).flatten(4),
    "pixels and channels": lambda x: x.permute(0, 2, 3, 1).flatten(1),
    "pixels and samples": lambda x: x.permute(2, 3, 0, 1).reshape(H * W * N, C),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze all": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(),
    "unsqueeze between": lambda x: x.unsqueeze(3).unsqueeze(0),
    "unsqueeze at the end": lambda x: x.unsqueeze(-1),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1, H, W),
    "expand to more dims": lambda x: x.expand(3, N, C, H, W),
    "expand_as": lambda x: x.unsqueeze(0).expand_as(x.expand(3, N, C, H, W)),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, N, C, H, W)),
    "repeat": lambda x: x.repeat(1, 3, 1, 1),
    "repeat into more dims": lambda x: x.repeat(2, 1, 3, 1, 1),
    "tile": lambda x: x.tile(2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(3, dim=1),
    "a chain through all forms": lambda x: (
        windows(x.permute(0, 2, 3, 1) * 2, 2).unsqueeze(0).transpose(0, 1).flatten(0, 1).sin()
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str, meshes: dict[tuple[int, int], Mesh]) -> None:
    for mesh in meshes.values():
        for memory_format in (torch.contiguous_format, torch.channels_last):
            image = parameter(random.Random(0), N, C, H, W).contiguous(memory_format=memory_format)
            if memory_format is torch.channels_last and "view" in name:
                continue
            check(VIEWS[name], image, [], mesh, f"{name} on {mesh.grid} ")


def test_operands_meet_whatever_their_dims(meshes: dict[tuple[int, int], Mesh]) -> None:
    """Whole tensors take their own box, wherever rows and columns are."""
    position = parameter(random.Random(1), 1, H * W, C)
    scale = parameter(random.Random(2), C)
    bias = parameter(random.Random(3), H, 1, C)

    def tokens(x: Tensor, position: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        t = x.flatten(2).transpose(1, 2) * scale + position
        y = t.reshape(N, H, W, C) * bias + x.permute(0, 2, 3, 1)
        return torch.where(y > 0, y, position.reshape(1, H, W, C))

    for mesh in meshes.values():
        image = parameter(random.Random(0), N, C, H, W)
        check(tokens, image, [position, scale, bias], mesh, f"tokens on {mesh.grid} ")


def test_convolutions_between_tokens(meshes: dict[tuple[int, int], Mesh]) -> None:
    """Hybrid networks go to tokens and back all the time; halos follow wherever pixels lie."""
    weight = parameter(random.Random(1), C, C, 3, 3)

    def hybrid(x: Tensor, weight: Tensor) -> Tensor:
        x = F.conv2d(x, weight, padding=1).flatten(2).transpose(1, 2)
        x = x.tanh().transpose(1, 2).reshape(N, C, H, W)
        x = F.conv2d(x, weight, stride=2, padding=1)
        return x.permute(0, 2, 3, 1)

    for mesh in meshes.values():
        image = parameter(random.Random(0), N, C, H, W)
        check(hybrid, image, [weight], mesh, f"hybrid on {mesh.grid} ")


ONE_PIXEL: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(1),
    "reshape": lambda x: x.reshape(N, C),
    "squeeze": lambda x: x.squeeze(-1).squeeze(-1),
    "squeeze both": lambda x: x.squeeze((2, 3)),
    "tokens": lambda x: x.flatten(2).transpose(1, 2),
    "the same shape": lambda x: x.view(N, C, 1, 1),
    "permute and view": lambda x: x.permute(0, 2, 3, 1).reshape(N, C),
}


@pytest.mark.parametrize("name", ONE_PIXEL)
def test_an_image_of_one_pixel_may_lose_its_dims(name: str, meshes: dict) -> None:
    """What a pooling over everything gives is an image still; a dense head comes after it."""

    def pooled(x: Tensor) -> Tensor:
        return ONE_PIXEL[name](F.avg_pool2d(x, (H, W)))

    for mesh in meshes.values():
        image = parameter(random.Random(0), N, C, H, W)
        check(pooled, image, [], mesh, f"{name} on {mesh.grid} ")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.permute(0, 3, 2, 1).flatten(1),
        lambda x: x.view(N, C, W, H),
    ],
)
def test_views_that_mix_pixels_are_refused(call: Callable[[Tensor], Tensor], meshes: dict) -> None:
    for mesh in meshes.values():
        with pytest.raises(UnsupportedSpatialOp, match=r"parallel\.gather_before"):
            call(shard(torch.rand(N, C, H, W), mesh))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.reshape(N, C, H, W + 1),
        lambda x: x.view(-1, 7),
        lambda x: x.permute(0, 1, 1, 2),
        lambda x: x.t(),
        lambda x: x.flatten(3, 1),
    ],
)
def test_what_pytorch_refuses(call: Callable[[Tensor], Tensor], meshes: dict) -> None:
    whole = torch.rand(N, C, H, W)
    for mesh in meshes.values():
        for image in (whole, shard(whole, mesh)):
            with pytest.raises(RuntimeError):
                call(image)


def test_writing_into_a_view_whose_base_lives_is_refused(meshes: dict) -> None:
    """Autograd would not know that the base has changed, and give a wrong gradient."""
    for mesh in several_ranks(meshes):
        x = shard(torch.rand(N, C, H, W, requires_grad=True), mesh) * 1
        y = x.permute(0, 2, 3, 1)
        with pytest.raises(UnsupportedSpatialOp, match="clone"):
            y.relu_()
        with pytest.raises(UnsupportedSpatialOp, match="clone"):
            x.relu_()
        with torch.no_grad():
            y.detach().relu_()


def test_writing_into_a_view_whose_base_is_gone(meshes: dict) -> None:
    def steps(x: Tensor) -> Tensor:
        x = x * 1
        x = x.permute(0, 2, 3, 1)
        x = x.relu_()
        return x * 2

    for mesh in meshes.values():
        check(steps, parameter(random.Random(0), N, C, H, W), [], mesh, f"on {mesh.grid} ")


def windows_of_volumes(x: Tensor) -> Tensor:
    """(N, C, D, H, W) as (N * windows, 8, C)."""
    n, c, d, h, w = x.shape
    parts = x.permute(0, 2, 3, 4, 1).reshape(n, d // 2, 2, h // 2, 2, w // 2, 2, c)
    return parts.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, 8, c)


def volume_of(windows: Tensor, size: tuple[int, ...]) -> Tensor:
    d, h, w = (n // 2 for n in size)
    parts = windows.view(-1, d, h, w, 2, 2, 2, windows.shape[-1])
    return parts.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(-1, windows.shape[-1], *size)


VOLUMES: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens": lambda x: x.flatten(2).transpose(1, 2),
    "tokens and back": lambda x: x.flatten(2).transpose(1, 2).exp().mT.reshape(x.shape),
    "channels last, tokens": lambda x: x.permute(0, 2, 3, 4, 1).reshape(x.shape[0], -1, x.shape[1]),
    "slices as frames": lambda x: x.transpose(1, 2).flatten(0, 1),
    "two dims merged": lambda x: x.flatten(3).exp().unflatten(3, x.shape[3:]),
    "other order": lambda x: x.permute(0, 1, 4, 2, 3) + 0 * x.permute(0, 1, 4, 2, 3).relu(),
    "all merged": lambda x: x.flatten(1),
    "channels in groups": lambda x: x.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2),
    "windows": windows_of_volumes,
    "windows and back": lambda x: volume_of(windows_of_volumes(x).exp(), x.shape[2:]),
    "softmax within windows": lambda x: volume_of(windows_of_volumes(x).softmax(1), x.shape[2:]),
    "means of windows": lambda x: x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).mean((4, 6)),
}


@pytest.mark.parametrize("name", VOLUMES)
def test_views_of_volumes(name: str) -> None:
    image = parameter(random.Random(3), 2, 4, 6, 8, 12)
    for mesh in every_mesh(3).values():
        check(VOLUMES[name], image, [], mesh, f"{name} on {mesh.grid}")


def test_views_of_signals() -> None:
    check_in(1, lambda x: x.transpose(1, 2).exp(), "tokens")
    check_in(1, lambda x: x.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2), "groups")
    check_in(1, lambda x: (x.unsqueeze(2) * x.unsqueeze(-2)).squeeze(2), "one more dim")
