"""Pixel shuffle, pixel unshuffle and channel shuffle."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.parallel.layout import Layout
from spatialdl.spatial.dims import image_dims
from spatialdl.spatial.span import on_meta
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, from_tile, on_layout, to_tile


def _check(function: object, x: SpatialTensor) -> None:
    if x.spatial_dims != image_dims(2) or x.dim() < 3:
        raise refusal(function, [x], "it takes (..., C, H, W), with rows and columns last")


@register_op(F.pixel_shuffle, torch.pixel_shuffle, split=("input",))
def pixel_shuffle(input: SpatialTensor, upscale_factor: int) -> Tensor:
    """Shi et al. (2016): C*r*r channels of one pixel become r*r pixels of C channels; local."""
    _check(torch.pixel_shuffle, input)
    on_meta(torch.pixel_shuffle, input, upscale_factor)
    layout = input.spatial_layout
    output = _times(layout, upscale_factor)
    tile = to_tile(input)
    if tile.numel():
        tile = torch.pixel_shuffle(tile, upscale_factor)
    else:  # as in `pixel_unshuffle`, its backward
        *others, channels, height, width = tile.shape
        sizes = height * upscale_factor, width * upscale_factor
        tile = tile.reshape(*others, channels // upscale_factor**2, *sizes)
    return from_tile(tile, output, input.mesh)


def _times(layout: Layout, factor: int) -> Layout:
    return Layout((0, 1), tuple(tuple(b * factor for b in bounds) for bounds in layout.cuts))


@register_op(F.pixel_unshuffle, torch.pixel_unshuffle, split=("input",))
def pixel_unshuffle(input: SpatialTensor, downscale_factor: int) -> Tensor:
    """The inverse of `pixel_shuffle`; squares cut by the layout are first moved to one rank."""
    _check(torch.pixel_unshuffle, input)
    on_meta(torch.pixel_unshuffle, input, downscale_factor)
    output = _unshuffled(input.spatial_layout, downscale_factor)
    tile = to_tile(on_layout(input, _times(output, downscale_factor)))
    *others, channels, height, width = tile.shape
    sizes = height // downscale_factor, width // downscale_factor
    if tile.numel():
        tile = torch.pixel_unshuffle(tile, downscale_factor)
    else:  # PyTorch computes wrong channels for tensors without pixels
        tile = tile.reshape(*others, channels * downscale_factor**2, *sizes)
    return from_tile(tile, output, input.mesh)


@lru_cache(maxsize=4096)
def _unshuffled(layout: Layout, factor: int) -> Layout:
    return layout.strided((factor, factor), [pixels // factor for pixels in layout.size])


@register_op(F.channel_shuffle, torch.channel_shuffle, split=("input",))
def channel_shuffle(input: SpatialTensor, groups: int) -> Tensor:
    """Zhang et al. (2018), ShuffleNet; local."""
    on_meta(torch.channel_shuffle, input, groups)
    if input.spatial_dims.holds(1, input.dim()):
        raise refusal(torch.channel_shuffle, [input], "permute it so that dim 1 holds the channels")
    tile = to_tile(input)
    shuffled = tile.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)  # type: ignore[no-untyped-call]
    return from_tile(shuffled, input.spatial_layout, input.mesh, input.spatial_dims)
