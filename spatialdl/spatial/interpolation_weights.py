"""Interpolation weights of one dim: the inputs of each output, and their weights.

Follows PyTorch's arithmetic (aten/src/ATen/native/UpSample.h and cpu/UpSampleKernel.cpp) in global
indices, so that each rank computes its part of the table of a single process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from spatialdl.torch_internals import nn_functions

CUBIC = -0.75
CUBIC_ANTIALIAS = -0.5
"""The constant of the cubic kernel (Keys 1981); PyTorch's differs for antialiasing."""


@dataclass(frozen=True)
class ResampledDim:
    """The resampling of one dim.

    Attributes:
        mode: nearest, nearest-exact, linear or cubic.
        size: number of inputs.
        count: number of outputs.
        scale: the user's scale factor, outputs per input; or None.
        dims: spatial dims of the image.
    """

    mode: str
    size: int
    count: int
    align_corners: bool = False
    antialias: bool = False
    scale: float | None = None
    dims: int = 2

    @property
    def factor(self) -> int:
        """Outputs per input if an integer, without align_corners and antialias; else 0."""
        whole = self.count % self.size == 0 and not self.align_corners and not self.antialias
        factor = self.count // self.size
        return factor if whole and self.scale in (None, factor) else 0

    def step(self, dtype: torch.dtype) -> Tensor:
        """Inputs per output."""
        if self.align_corners:
            exact = (self.size - 1) / (self.count - 1) if self.count > 1 else 0.0
        elif self.scale is not None and self.scale > 0:
            exact = 1.0 / self.scale
        else:
            exact = self.size / self.count
        return torch.tensor(exact, dtype=dtype)


@dataclass(frozen=True, eq=False)
class InterpolationWeights:
    """Indices (outputs, taps) of the inputs, and their weights (None: one tap, weight 1)."""

    index: Tensor
    weight: Tensor | None

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """The interval of inputs that outputs [start, stop) read."""
        if stop <= start:
            return 0, 0
        part = self.index[start:stop]
        return int(part.min()), int(part.max()) + 1


@lru_cache(maxsize=512)
def interpolation_weights(how: ResampledDim, dtype: torch.dtype) -> InterpolationWeights:
    """The table of all outputs; weights in `dtype`, float32 or float64."""
    if how.mode.startswith("nearest"):
        return InterpolationWeights(_nearest(how, dtype), None)
    if how.antialias and how.size == how.count:
        every = torch.arange(how.count).view(-1, 1)
        return InterpolationWeights(every, torch.ones(every.shape, dtype=dtype))
    if how.antialias:
        return _antialiased(how, dtype)
    step, outputs = how.step(dtype), torch.arange(how.count, dtype=dtype)
    centre = outputs * step if how.align_corners else step * (outputs + 0.5) - 0.5
    if how.mode == "linear":
        if how.size == how.count:
            centre = outputs
        centre = centre.clamp(min=0)
    first = centre.floor().clamp(max=how.size - 1)
    shift = (centre - first).clamp(0, 1)
    if how.mode == "linear":
        reach, weights = (0, 1), [1 - shift, shift]
    else:
        reach = (-1, 2)
        weights = [_cubic(shift - k, CUBIC) for k in range(-1, 3)]
    index = first.long()[:, None] + torch.arange(reach[0], reach[1] + 1)
    return InterpolationWeights(index.clamp(0, how.size - 1), torch.stack(weights, 1))


def _nearest(how: ResampledDim, dtype: torch.dtype) -> Tensor:
    """Indices computed by PyTorch, whose rounding differs between images and other inputs."""
    others = [1] * (how.dims - 1)
    column = torch.arange(how.size, dtype=dtype).view(1, 1, -1, *others)
    exact = "_exact" if how.mode == "nearest-exact" else ""
    kernel = getattr(nn_functions, f"{exact and '_'}upsample_nearest{exact}{how.dims}d")
    scales = None if how.scale is None else [how.scale, *map(float, others)]
    indices: Tensor = kernel(column, None if scales else [how.count, *others], scales)
    return indices.view(-1, 1).long()


def _cubic(x: Tensor, a: float) -> Tensor:
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _antialiased(how: ResampledDim, dtype: torch.dtype) -> InterpolationWeights:
    """Antialiased weights: the kernel is widened by the step if the image shrinks."""
    step = how.step(dtype)
    wide = step.clamp(min=1)
    support = wide * (1 if how.mode == "linear" else 2)
    centre = step * (torch.arange(how.count, dtype=dtype) + 0.5)
    first = (centre - support + 0.5).trunc().long().clamp(min=0)
    last = (centre + support + 0.5).trunc().long().clamp(max=how.size)
    places = torch.arange(int((last - first).max()))
    index = first[:, None] + places
    x = (index.to(dtype) - centre[:, None] + 0.5) / wide
    weight = (1 - x.abs()).clamp(min=0) if how.mode == "linear" else _cubic(x, CUBIC_ANTIALIAS)
    weight = torch.where(index < last[:, None], weight, torch.zeros_like(weight))
    index = torch.minimum(index, last[:, None] - 1).clamp(min=0)
    return InterpolationWeights(index, weight / weight.sum(1, keepdim=True))
