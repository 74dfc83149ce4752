"""Padding and cropping of split images against one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import check, close, draw, every_mesh, in_all_dims, parameter

MODES = ("constant", "reflect", "replicate", "circular")


def pads_of(rng: random.Random, size: int, mode: str) -> tuple[int, int]:
    """Two pads, negative ones too, that PyTorch takes for a dim of `size`."""
    most = {"constant": 9, "replicate": 9, "reflect": size - 1, "circular": size}[mode]
    while True:
        before, after = rng.randint(-3, min(most, 9)), rng.randint(-3, min(most, 9))
        kept = size + min(before, 0) + min(after, 0)
        wraps = mode == "circular" and max(before, after) > kept
        if kept > 0 and not wraps and rng.random() < 0.7:
            return before, after
        if rng.random() < 0.3:
            return 0, 0


@in_all_dims(10, 200)
@pytest.mark.parametrize("mode", MODES)
def test_pad(mode: str, dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims))
    pads = [pads_of(rng, size, mode) for size in s.image.shape[2:]]
    value = rng.choice((None, 0.0, -1.5)) if mode == "constant" else None

    def pad(x: Tensor) -> Tensor:
        return F.pad(x, [n for ends in reversed(pads) for n in ends], mode, value)

    check(pad, s.image, [], s.mesh, f"{s}, {pads}, {mode}")


@in_all_dims(12, 12)
def test_pad_of_channels_and_samples_too(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims))
    pads = tuple(rng.choice((-1, 0, 1, 2)) for _ in range(2 * rng.choice((1, 3, 2 + dims))))
    if min(n + sum(pads[2 * k : 2 * k + 2]) for k, n in enumerate(reversed(s.image.shape))) < 1:
        return
    check(lambda x: F.pad(x, pads, value=0.5), s.image, [], s.mesh, f"{s}, {pads}")


@in_all_dims(8, 100)
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_convolutions_with_padding_modes(mode: str, dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims))
    padding = [min(p, n - 1) for p, n in zip(s.padding, s.image.shape[2:], strict=True)]
    kernel = [
        min(k, n + 2 * p) for k, n, p in zip(s.kernel, s.image.shape[2:], padding, strict=True)
    ]
    layer = getattr(nn, f"Conv{dims}d")
    module = layer(4, 3, kernel, s.stride, padding, padding_mode=mode, dtype=torch.float64)
    weight = parameter(rng, *module.weight.shape)

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(
            module, {"weight": weight, "bias": zeros.to(x.device)}, (x,)
        )

    zeros = torch.zeros(3, dtype=torch.float64)
    check(convolve, s.image, [weight], s.mesh, f"{s}, {mode}")


@pytest.mark.parametrize(
    "module",
    [
        nn.ZeroPad2d((1, 0, 3, 2)),
        nn.ReflectionPad2d(1),
        nn.ReplicationPad2d((0, 3, 4, 0)),
        nn.CircularPad2d((1, 2, 0, 1)),
        nn.ConstantPad2d(-1, 2.0),
    ],
    ids=lambda module: type(module).__name__,
)
def test_padding_modules(module: nn.Module, meshes: dict) -> None:
    rng = random.Random(0)
    for mesh in meshes.values():
        check(module, parameter(rng, 2, 3, 9, 7), [], mesh, f"{module} on {mesh.grid}")


def test_a_chain_of_pads_and_crops(meshes: dict) -> None:
    """Ranks run out of pixels, and get some again."""

    def chain(x: Tensor) -> Tensor:
        x = F.pad(x, (2, 2, 2, 2), "reflect").sin()
        x = F.pad(x, (-3, -4, -5, -4)).sin()
        x = F.pad(x, (1, 1, 1, 1), "replicate").sin()
        return F.pad(x, (3, 0, 0, 3), "circular")

    rng = random.Random(1)
    for mesh in meshes.values():
        check(chain, parameter(rng, 2, 3, 7, 6), [], mesh, f"chain on {mesh.grid}")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_pad_of_labels_and_half_precision(mode: str, dtype: torch.dtype, meshes: dict) -> None:
    whole = (torch.arange(2 * 9 * 7) % 5).view(2, 9, 7).to(dtype)
    pads = (2, -1, 1, 3)
    if dtype == torch.bool and mode in ("reflect", "replicate"):
        pytest.skip("PyTorch does not do it")
    plain = F.pad(whole, pads, mode)
    for mesh in meshes.values():
        ours = F.pad(shard(whole, mesh), pads, mode)
        assert ours.dtype == dtype
        close(ours.full_tensor(), plain, f"{mode} on {mesh.grid}")


@pytest.mark.parametrize(
    ("mode", "pads", "error"),
    [
        ("constant", (0, -6), "length must be non-negative"),
        ("reflect", (0, 0, 5, 0), "Padding size should be less"),
        ("circular", (0, 6, 0, 0), "wrapping around more than once"),
        ("what", (1, 1), "what"),
    ],
)
def test_what_pytorch_refuses(mode: str, pads: tuple[int, ...], error: str, meshes: dict) -> None:
    image = torch.zeros(1, 1, 5, 5)
    for mesh in meshes.values():
        for x in (image, shard(image, mesh)):
            with pytest.raises((RuntimeError, NotImplementedError), match=error):
                F.pad(x, pads, mode)


def test_a_circular_pad_that_takes_what_it_crops_is_refused(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.zeros(1, 1, 5, 5), mesh)
        with pytest.raises(UnsupportedSpatialOp, match="circular pad"):
            F.pad(x, (0, 0, 4, -3), "circular")


def test_a_pad_keeps_the_cut_where_it_is(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.zeros(1, 1, 40, 40), mesh)
        padded = F.pad(x, (1, 1, 1, 1), "reflect").spatial_layout
        for before, after in (
            (x.spatial_layout.cuts[0], padded.cuts[0]),
            (x.spatial_layout.cuts[1], padded.cuts[1]),
        ):
            assert after[:-1] == before[:-1]


@pytest.mark.parametrize("mode", ["replicate", "reflect"])
@pytest.mark.parametrize("pads", [(5, -7), (5, -9), (-7, 5), (-9, 6), (4, -8), (-3, 2), (6, 6)])
def test_a_crop_may_reach_into_the_pad(mode: str, pads: tuple[int, int], meshes: dict) -> None:
    """Once the crop was taken from the image alone, and the output was too wide."""

    def pad(x: Tensor) -> Tensor:
        return F.pad(F.pad(x, (*pads, 1, 1), mode), (0, 0, *pads), mode)

    for mesh in meshes.values():
        image = parameter(random.Random(0), 1, 2, 8, 8)
        check(pad, image, [], mesh, f"{mode} {pads} on {mesh.grid} ")
