"""The table of a resampling is PyTorch's own, without ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.spatial.resample import ResampledDim, interpolation_weights

MODES = {"nearest": "nearest", "nearest-exact": "nearest-exact", "linear": "bilinear"}
MODES |= {"cubic": "bicubic"}
SIZES = [(7, 7), (7, 14), (7, 20), (14, 7), (20, 7), (20, 3), (9, 2), (5, 1), (1, 4), (1, 1)]
SCALES = [1.0, 1.05, 0.97, 2.0, 2.05, 0.5, 1 / 3]


def applied(how: ResampledDim, column: Tensor) -> Tensor:
    taps = interpolation_weights(how, column.dtype)
    read = column[taps.index]
    return read[:, 0] if taps.weight is None else (read * taps.weight).sum(1)


def interpolated(how: ResampledDim, column: Tensor) -> Tensor:
    """By PyTorch; with other dims that stay as they are."""
    others = how.dims - 1
    image = column.view(1, 1, -1, *[1] * others).expand(1, 1, -1, *[3] * others)
    mode = MODES[how.mode]
    options = {} if mode.startswith("nearest") else {"align_corners": how.align_corners}
    if how.antialias:
        options["antialias"] = True
    size = (how.count, *[3] * others) if how.scale is None else None
    factor = None if how.scale is None else (how.scale, *[1.0] * others)
    found = F.interpolate(image, size, factor, mode, **options)
    return found.reshape(found.shape[2], -1)[:, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_those_of_pytorch(mode: str, dtype: torch.dtype) -> None:
    smooth = mode in ("linear", "cubic")
    cases = [ResampledDim(mode, *pair) for pair in SIZES]
    cases += [ResampledDim(mode, 10, int(10 * s), scale=s) for s in SCALES]
    if smooth:
        cases += [ResampledDim(mode, *pair, align_corners=True) for pair in SIZES]
        cases += [ResampledDim(mode, *pair, antialias=True) for pair in SIZES]
        cases += [ResampledDim(mode, 10, int(10 * s), False, True, s) for s in SCALES]
    else:  # rounded otherwise in signals and volumes than in images
        cases += [replace(how, dims=dims) for how in cases for dims in (1, 3)]
    draw = torch.Generator().manual_seed(0)
    for how in cases:
        column = torch.randn(how.size, generator=draw, dtype=torch.float64).to(dtype)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(
            applied(how, column),
            interpolated(how, column),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, h=how: f"{h}: {m}",
        )


@pytest.mark.parametrize(("mode", "radius"), [("linear", 1), ("cubic", 2)])
@pytest.mark.parametrize(("size", "count"), [(20, 7), (61, 9), (7, 20)])
def test_antialiasing_reads_no_more_than_its_kernel(
    mode: str, radius: int, size: int, count: int
) -> None:
    """Pixels with a weight of 0 would be right, and be sent for nothing."""
    taps = interpolation_weights(ResampledDim(mode, size, count, antialias=True), torch.float64)
    assert taps.index.shape[1] <= 2 * radius * max(1, size / count) + 1
