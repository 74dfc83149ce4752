"""Measures the memory of a network for a whole image, without data."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.spatial.meta import meta_copy
from spatialdl.spatial.recompute import recompute_blocks
from spatialdl.torch_internals import TorchDispatchMode, tree_leaves

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
    shadow, count = meta_copy(model).to(dtype), _Count()
    if recompute:
        recompute_blocks(shadow)
    shadow.train(trains)
    try:
        with torch.set_grad_enabled(trains), count, torch.device("meta"):
            image = torch.empty(tuple(shape), dtype=dtype, device="meta")
            outputs = [
                output for output in tree_leaves(shadow(image)) if isinstance(output, Tensor)
            ]
            differentiable = [output for output in outputs if output.requires_grad]
            del image, outputs
            if differentiable:
                torch.autograd.backward(
                    differentiable, [torch.empty_like(output) for output in differentiable]
                )
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
        return None  # it depends on values, or an operation has no meta implementation
    return ImageSizes(count.peak, count.largest)


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of each operation, including those of backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.here = self.peak = self.largest = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = {}
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                storages[storage._cdata] = storage
        self.largest = max(self.largest, sum(storage.nbytes() for storage in storages.values()))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def gone(_: Any) -> None:
            self.here -= nbytes
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, gone)
        self.here += nbytes
        self.peak = max(self.peak, self.here)


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
