"""Convolutions that read no neighbours along the spatial dims.

Kernels of one pixel mix channels, of tokens (N, C, H*W) and of windows (N, C, pixels, windows).
Larger kernels are local if each window is a sample, (N*H*W, C, rows, columns).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.spatial.span import on_meta, split_dims, without_dims
from spatialdl.spatial.tensor import SpatialTensor, refusal, to_tile
from spatialdl.spatial.window import autocast_cast, empty_output, per_dim


def is_of_one_pixel(weight: Tensor, stride: Any, padding: Any) -> bool:
    """Whether each output of a convolution reads only the pixel at its position."""
    no_padding = padding in ("same", "valid") or _are_all(padding, 0)
    return _are_all(weight.shape[2:], 1) and _are_all(stride, 1) and no_padding


def _are_all(values: Any, wanted: int) -> bool:
    return all(v == wanted for v in ([values] if isinstance(values, int) else values))


def check_channels(name: str, input: Tensor, weight: Tensor, groups: int) -> None:
    """Refuse a weight for a different number of channels, as PyTorch does."""
    if input.shape[1] != weight.shape[1] * groups:
        raise ValueError(
            f"{name}: the image has {input.shape[1]} channels, but the weight "
            f"{tuple(weight.shape)} with groups={groups} expects {weight.shape[1] * groups}"
        )


def conv_of_channels(
    function: Any, input: SpatialTensor, weight: Tensor, bias: Tensor | None, groups: int
) -> Tensor:
    """`function` (`torch.conv1d`, ...) with a kernel of one pixel."""
    if input.dim() != weight.dim() or 1 in split_dims(input):
        return _conv_of_tokens(function, input, weight, bias, groups)
    check_channels(function.__name__, input, weight, groups)
    return conv_of_samples(function, input, weight, bias, groups=groups)


def _conv_of_tokens(
    function: Any, input: SpatialTensor, weight: Tensor, bias: Tensor | None, groups: int
) -> Tensor:
    """A convolution whose channels are the tokens (an MLP mixer): a linear layer over them."""
    if input.dim() != weight.dim() or split_dims(input) != (1,) or groups > 1:
        raise refusal(function, [input], "dim 1 (channels) must not be split; permute it")
    check_channels(function.__name__, input, weight, groups)
    return F.linear(input.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


def conv_of_samples(
    function: Any, input: SpatialTensor, weight: Tensor, bias: Tensor | None, **steps: Any
) -> SpatialTensor:
    """`function` on every tile, if no convolved dim is split."""
    # Cast here, so that ranks with and without pixels have results of one dtype.
    tile, weight, bias = autocast_cast(to_tile(input), weight, bias)
    if tile.numel() > 0:
        y = function(tile, weight, bias, **steps)
    else:
        size = tile.shape[2:]
        if tile.shape[0] == 0:
            one = tile.new_empty(1, *tile.shape[1:])
            size = on_meta(function, one, weight, bias, **steps).shape[2:]
        shape = (tile.shape[0], weight.shape[0], *size)
        y = empty_output(shape, tile, weight, *(() if bias is None else (bias,)))
    return without_dims(input, y, ())


def passes_unsplit_dims(input: SpatialTensor, weight: Tensor, stride: Any, padding: Any) -> bool:
    """Whether a convolution covers all spatial dims and dims that are not split.

    The latter must have a kernel of size 1, stride 1 and no padding.
    """
    split, dims = split_dims(input), weight.dim() - 2
    others = [n - 2 for n in range(2, weight.dim()) if n not in split]
    if input.dim() != weight.dim() or not others or min(split) < 2:
        return False
    return input.spatial_dims.apart and all(
        weight.shape[2 + n] == per_dim(stride, dims)[n] == 1
        and (isinstance(padding, str) or per_dim(padding, dims)[n] == 0)
        for n in others
    )


def conv_beside(
    input: SpatialTensor, weight: Tensor, bias: Tensor | None, steps: Sequence[Any], groups: int
) -> Tensor:
    """Convolve with one dim less: entries of a dim that is not split become samples.

    Args:
        steps: stride, padding and dilation.
    """
    dims = weight.dim() - 2
    place = next(n for n in range(2, weight.dim()) if n not in split_dims(input))
    fewer = [
        step if isinstance(step, str) else _without(per_dim(step, dims), place - 2)
        for step in steps
    ]
    function: Any = {1: torch.conv1d, 2: torch.conv2d}[dims - 1]
    x = input.movedim(place, 1).flatten(0, 1)
    y = function(x, weight.squeeze(place), bias, *fewer, groups)
    apart: Tensor = y.unflatten(0, (input.shape[0], input.shape[place]))
    return apart.movedim(1, place)


def _without(values: tuple[int, ...], place: int) -> tuple[int, ...]:
    return (*values[:place], *values[place + 1 :])
