"""Padding, cropping and folding of split images against one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mpi.equality import (
    check,
    check_keyed,
    draw,
    every_mesh,
    in_all_dims,
    parameter,
    same,
    seeds,
)
from tests.mpi.spatial.shared import Cases

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


@pytest.mark.tiles
@in_all_dims(3, 200)
@pytest.mark.parametrize("mode", MODES)
def test_pad(mode: str, dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims))
    pads = [pads_of(rng, size, mode) for size in s.image.shape[2:]]
    value = rng.choice((None, 0.0, -1.5)) if mode == "constant" else None

    def pad(x: Tensor) -> Tensor:
        return F.pad(x, [n for ends in reversed(pads) for n in ends], mode, value)

    check(pad, s.image, [], s.mesh, f"{s}, {pads}, {mode}")


@pytest.mark.tiles
@in_all_dims(3, 12)
def test_pad_of_channels_and_samples_too(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims))
    pads = tuple(rng.choice((-1, 0, 1, 2)) for _ in range(2 * rng.choice((1, 3, 2 + dims))))
    if min(n + sum(pads[2 * k : 2 * k + 2]) for k, n in enumerate(reversed(s.image.shape))) < 1:
        return
    check(lambda x: F.pad(x, pads, value=0.5), s.image, [], s.mesh, f"{s}, {pads}")


def crossed(x: Tensor, mode: str, pads: tuple[int, int]) -> Tensor:
    return F.pad(F.pad(x, (*pads, 1, 1), mode), (0, 0, *pads), mode)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(nn.Unfold(3, padding=1)(x).transpose(1, 2) @ weight.t())


def raised(x: Tensor, weight: Tensor) -> Tensor:
    """A transposed convolution, to other sizes than the tokens came from."""
    size = [2 * n + 3 for n in x.shape[-2:]]
    return nn.Fold(size, 5, stride=2, padding=0)(weight @ x.flatten(2))


MODULES = (
    nn.ZeroPad2d((1, 0, 3, 2)),
    nn.ReflectionPad2d(1),
    nn.ReplicationPad2d((0, 3, 4, 0)),
    nn.CircularPad2d((1, 2, 0, 1)),
    nn.ConstantPad2d(-1, 2.0),
)
CASES: Cases = {
    **{type(one).__name__: (one, (2, 3, 9, 7), []) for one in MODULES},
    **{  # once the crop was taken from the image alone, and the output was too wide
        f"a crop into the pad, {mode} {pads}": (
            lambda x, m=mode, p=pads: crossed(x, m, p),
            (1, 2, 8, 8),
            [],
        )
        for mode, some in (
            ("replicate", ((5, -9), (-9, 6), (4, -8), (-3, 2))),
            ("reflect", ((5, -9), (-9, 6))),
        )
        for pads in some
    },
    "a convolution by unfold": (convolved, (2, 3, 9, 8), [(5, 3 * 9)]),
    "windows where ranks have none": (
        lambda x: F.max_pool2d(x.unfold(2, 4, 2)[..., 0], 2).unfold(-1, 2, 1),
        (2, 5, 9, 8),
        [],
    ),
    **{
        f"raised from {size}": (raised, (2, 3, *size), [(2 * 25, 3)])
        for size in ((9, 8), (6, 6), (4, 13))
    },
    "raised where ranks have none": (
        lambda x, w: raised(F.max_pool2d(x, 3, 3), w),
        (2, 3, 6, 6),
        [(2 * 25, 3)],
    ),
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, meshes: dict) -> None:
    check_keyed(*CASES[name], meshes, name)


@pytest.mark.parametrize("mode", MODES)
def test_pad_of_labels(mode: str, meshes: dict) -> None:
    for dtype in (torch.int64, torch.bool):
        if dtype == torch.int64 or mode in ("constant", "circular"):  # others PyTorch does not do
            whole = (torch.arange(2 * 9 * 7) % 5).view(2, 9, 7).to(dtype)
            same(lambda x: F.pad(x, (2, -1, 1, 3), mode), whole, meshes, mode)


# --- windows as tokens


@pytest.mark.tiles
@pytest.mark.parametrize("seed", seeds(3, 200))
def test_unfold(seed: int, meshes: dict) -> None:
    rng = random.Random(seed)
    s = draw(rng, meshes)

    def unfold(x: Tensor) -> Tensor:
        return F.unfold(x, s.kernel, s.dilation, s.padding, s.stride)

    check(unfold, s.image, [], s.mesh, str(s))


@pytest.mark.tiles
@pytest.mark.parametrize("seed", seeds(4, 100))
def test_windows_along_a_dim(seed: int, meshes: dict) -> None:
    """Of rows, columns or channels, of maps whose channels are the first or the last dim."""
    rng = random.Random(seed)
    s = draw(rng, meshes)
    dim, last = rng.choice((1, 2, 3, -1)), rng.choice((True, False))
    size = rng.randint(1, 3 if dim == 1 and not last else 2)
    step = rng.randint(1, 3)

    def windows(x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1) if last else x
        return x.unfold(dim, size, step).sin()

    check(windows, s.image, [], s.mesh, f"{s}, {dim}, {size}, {step}")


@pytest.mark.tiles
@pytest.mark.parametrize("seed", seeds(4, 200))
def test_fold(seed: int, meshes: dict) -> None:
    """Of tokens that are not what any image gives: each window has values of its own."""
    rng = random.Random(seed)
    s = draw(rng, meshes)
    steps = (s.kernel, s.dilation, s.padding, s.stride)
    taps = s.kernel[0] * s.kernel[1]

    def fold(x: Tensor, weight: Tensor) -> Tensor:
        tokens = torch.tanh(F.unfold(x, *steps).transpose(1, 2) @ weight).transpose(1, 2)
        return F.fold(tokens, x.shape[-2:], *steps)

    check(fold, s.image, [parameter(rng, 4 * taps, 3 * taps)], s.mesh, str(s))
