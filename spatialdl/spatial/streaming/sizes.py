"""Measures the memory of a network for a whole image, without data."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import nn

from spatialdl.spatial.meta import meta_copy, run_backward
from spatialdl.spatial.recompute import recompute_blocks
from spatialdl.spatial.streaming.ledger import Ledger

SHARE = 0.4
"""Fraction of the limit for inputs and outputs of the largest operation on a tile."""


class ImageSizes(NamedTuple):
    """Bytes for one image, forward and backward.

    Attributes:
        live: peak of simultaneously allocated tensors.
        largest: maximum bytes of inputs and outputs of an operation.
    """

    live: int
    largest: int


def sizes_of(
    model: nn.Module,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    trains: bool = True,
    recompute: bool = False,
) -> ImageSizes | None:
    """Measure a network, in training with its backward; None if it cannot be run without data.

    Args:
        shape: of the images, (N, C, *spatial).
        dtype: of images and weights.
        trains: whether to measure training with its backward.
        recompute: whether its blocks are recomputed in backward.
    """
    shadow, ledger = meta_copy(model).to(dtype), Ledger()
    if recompute:
        recompute_blocks(shadow)
    shadow.train(trains)
    for tensor in (*shadow.parameters(), *shadow.buffers()):
        ledger.own(tensor)
    try:
        with torch.set_grad_enabled(trains), ledger.watch():
            run_backward(shadow(torch.empty(tuple(shape), dtype=dtype)))
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
        return None  # it depends on values, or an operation has no meta implementation
    return ImageSizes(ledger.peak, ledger.largest)


def tiles_within(
    sizes: ImageSizes, limit: int, size: Sequence[int], grid: Sequence[int]
) -> list[int]:
    """Number of virtual tiles of a rank along each spatial dim.

    The smallest number for which the largest operation on a tile takes `SHARE` of the limit.

    Args:
        limit: bytes.
        size: of the spatial dims of the image.
        grid: ranks along each of them.
    """
    tiles = [1] * len(size)
    while sizes.largest > SHARE * limit * prod(tiles) * prod(grid):
        tile = [
            extent / (parts * own) for extent, parts, own in zip(size, grid, tiles, strict=True)
        ]
        longest = tile.index(max(tile))
        if tile[longest] < 2:
            break
        tiles[longest] += 1
    return tiles


def stored(sizes: ImageSizes, limit: int, ranks: int) -> int:
    """Bytes on disk per rank."""
    return max(0, ceil(sizes.live / ranks) - limit)
