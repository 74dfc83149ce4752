"""Interpolation of split images against one process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import (
    Operation,
    check,
    check_keyed,
    draw,
    every_mesh,
    in_all_dims,
    same,
)
from tests.mpi.spatial.shared import Cases
from tests.spatial.test_one_rank import LINEAR, has_a_wrong_gradient

MODES = ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
SMOOTH = ("bilinear", "bicubic")


def any_size(rng: random.Random, sizes: list[int]) -> dict[str, Any]:
    kind = rng.choice(("size", "whole", "scale", "pair", "one", "recomputed"))
    if kind == "size":
        return {"size": tuple(rng.randint(1, 2 * n + 3) for n in sizes)}
    if kind == "whole":
        factors = [rng.choice((1, 2, 3, 4)) for _ in sizes]
        return {"size": [f * n for f, n in zip(factors, sizes, strict=True)]}
    if kind == "one":
        return {"size": rng.choice((1, 5))}
    scales = (2, 2.0, 3.0, 1.5, 0.5, 0.7, 1 / 3, 2.3, 1.04)
    allowed = [s for s in scales if min(sizes) * s >= 1]
    scale = tuple(rng.choice(allowed) for _ in sizes) if kind == "pair" else rng.choice(allowed)
    return {"scale_factor": scale, "recompute_scale_factor": kind == "recomputed" or None}


@pytest.mark.tiles
@in_all_dims(4, 500)
@pytest.mark.parametrize("mode", MODES)
def test_interpolate(mode: str, dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims))
    options = any_size(rng, list(s.image.shape[2:]))
    if mode == "bicubic" and dims != 2:
        pytest.skip("PyTorch has it for images only")
    if mode in SMOOTH:
        one_column = F.interpolate(s.image, **options).shape[-1] == 1
        options["align_corners"] = rng.choice((None, False, True))
        options["antialias"] = rng.random() < 0.25 and not one_column and dims == 2
    if mode == "area" and isinstance(options.get("scale_factor"), tuple):
        options["recompute_scale_factor"] = True

    def resize(x: Tensor) -> Tensor:
        return F.interpolate(x, mode=LINEAR[dims] if mode == "bilinear" else mode, **options)

    if has_a_wrong_gradient(mode, s.image, **options):
        with pytest.raises(UnsupportedSpatialOp, match="gradient is wrong"):
            check(resize, s.image, [], s.mesh, f"{s}, {mode}, {options}")
        return
    check(resize, s.image, [], s.mesh, f"{s}, {mode}, {options}")


def pooled(x: Tensor) -> Tensor:
    """DeepLab (Chen et al., 2017): image-level features beside the map."""
    return x * F.interpolate(F.adaptive_avg_pool2d(x, 1), x.shape[2:], mode="bilinear")


def chain(mode: str) -> Operation:
    """Ranks run out of pixels, and get some again."""

    def run(x: Tensor) -> Tensor:
        for size in ((5, 6), (1, 1), (4, 3), (2, 1), (13, 9)):
            x = F.interpolate(x, size, mode=mode).sin()
        return x

    return run


MODULES = (
    nn.Upsample(scale_factor=2),
    nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    nn.Upsample((17, 40), mode="bicubic"),
    nn.UpsamplingNearest2d(scale_factor=3),
    nn.UpsamplingBilinear2d((9, 9)),
)
CASES: Cases = {
    **{str(module): (module, (2, 3, 7, 10), []) for module in MODULES},
    **{f"down to one pixel and up, {mode}": (chain(mode), (2, 3, 9, 11), []) for mode in MODES},
    "a pooled map grows back": (pooled, (2, 3, 9, 11), []),
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, meshes: dict) -> None:
    check_keyed(*CASES[name], meshes, name)


def test_bytes(meshes: dict) -> None:
    whole = (torch.arange(2 * 3 * 7 * 10) % 251).view(2, 3, 7, 10).to(torch.uint8)
    for size in ((14, 30), (5, 23)):
        same(lambda x, n=size: F.interpolate(x, n, mode="nearest"), whole, meshes, f"{size}")


def test_antialiasing_to_one_column_is_refused(meshes: dict) -> None:
    """PyTorch itself repeats the first row then: an image of ones by rows shows it."""
    ramp = torch.arange(6.0).view(1, 1, 6, 1).expand(1, 1, 6, 4)
    wrong = F.interpolate(ramp, (3, 1), mode="bilinear", antialias=True)
    assert bool(torch.all(wrong == wrong[0, 0, 0, 0]))
    for mesh in meshes.values():
        with pytest.raises(UnsupportedSpatialOp, match="one column"):
            F.interpolate(shard(ramp, mesh), (3, 1), mode="bilinear", antialias=True)
