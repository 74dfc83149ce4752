"""Convolutions of one pixel: they mix channels, wherever the spatial dims are.

Tokens (N, C, H*W), and windows (N, C, pixels, windows), have no neighbours to be convolved with.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spatialdl.spatial.span import split_dims, without_dims
from spatialdl.spatial.tensor import SpatialTensor, refusal, to_tile
from spatialdl.spatial.window import autocast_cast, nothing


def is_of_one_pixel(weight: Tensor, stride: Any, padding: Any) -> bool:
    """Whether a convolution with these arguments reads the pixel that it writes, and no other."""
    no_padding = padding in ("same", "valid") or _are_all(padding, 0)
    return _are_all(weight.shape[2:], 1) and _are_all(stride, 1) and no_padding


def _are_all(values: Any, wanted: int) -> bool:
    return all(v == wanted for v in ([values] if isinstance(values, int) else values))


def check_channels(name: str, input: Tensor, weight: Tensor, groups: int) -> None:
    """Refuse a weight for another number of channels, as PyTorch does."""
    if input.shape[1] != weight.shape[1] * groups:
        raise ValueError(
            f"{name}: the image has {input.shape[1]} channels, but the weight "
            f"{tuple(weight.shape)} with groups={groups} takes {weight.shape[1] * groups}"
        )


def conv_of_channels(
    function: Any, input: SpatialTensor, weight: Tensor, bias: Tensor | None, groups: int
) -> SpatialTensor:
    """`function` (`torch.conv1d` ...) with a kernel of one pixel, on every rank."""
    if input.dim() != weight.dim() or 1 in split_dims(input):
        raise refusal(function, [input], "dim 1, of channels, must not be split; permute it")
    check_channels(function.__name__, input, weight, groups)
    # cast here, so that ranks without pixels give the same type as those with
    tile, weight, bias = autocast_cast(to_tile(input), weight, bias)
    if tile.numel() > 0:
        y = function(tile, weight, bias, groups=groups)
    else:
        shape = (tile.shape[0], weight.shape[0], *tile.shape[2:])
        y = nothing(shape, tile, weight, *(() if bias is None else (bias,)))
    return without_dims(input, y, ())
