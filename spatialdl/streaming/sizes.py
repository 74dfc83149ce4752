"""What a network takes of memory for a whole image, found out without data."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spatialdl.spatial.recompute import recompute_blocks
from spatialdl.spatial.shadow import meta_copy

SHARE = 0.4
"""Of a limit that an operation may take for what it reads and makes of a tile."""


class ImageSizes(NamedTuple):
    """Bytes for one image, forward and backward.

    Attributes:
        live: tensors that are there at the same time, at most.
        largest: what one operation reads and makes, at most.
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
    """Those of a network, in training with its backward; None where it cannot be run without data.

    Args:
        shape: of the images, (N, C, *spatial).
        dtype: of images and weights.
        recompute: whether its blocks run again in backward.
    """
    shadow, count = meta_copy(model).to(dtype), _Count()
    if recompute:
        recompute_blocks(shadow)
    shadow.train(trains)
    try:
        with torch.set_grad_enabled(trains), count, torch.device("meta"):
            image = torch.empty(tuple(shape), dtype=dtype, device="meta")
            outputs = [one for one in tree_leaves(shadow(image)) if isinstance(one, Tensor)]
            learnt = [one for one in outputs if one.requires_grad]
            del image, outputs
            if learnt:
                torch.autograd.backward(learnt, [torch.empty_like(one) for one in learnt])
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
        return None  # of values, or with an operation that has no shape of its own
    return ImageSizes(count.peak, count.largest)


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation, those of backward included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.here = self.peak = self.largest = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = {}
        for one in tree_leaves((args, kwargs, result)):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                storages[storage._cdata] = storage
        self.largest = max(self.largest, sum(one.nbytes() for one in storages.values()))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self._note(one.untyped_storage())
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
    """Into how many virtual tiles a rank cuts its part of an image, along each spatial dim.

    As few as let the largest operation on a tile take `SHARE` of the limit.

    Args:
        limit: bytes.
        size: of the spatial dims of the image.
        grid: ranks along each of them.
    """
    found = [1] * len(size)
    while sizes.largest > SHARE * limit * prod(found) * prod(grid):
        tile = [
            extent / (parts * own) for extent, parts, own in zip(size, grid, found, strict=True)
        ]
        longest = tile.index(max(tile))
        if tile[longest] < 2:
            break
        found[longest] += 1
    return found


def stored(sizes: ImageSizes, limit: int, ranks: int) -> int:
    """Bytes that wait on a disk, of each of so many ranks."""
    return max(0, ceil(sizes.live / ranks) - limit)
