"""Pooling a tile without a copy of it: alone, and once more where windows reach to other tiles.

Most windows lie in the tile, or in the tile and the padding around the image. Their outputs are
those of the tile alone, worked out while the halos travel. The others lie in thin bands along the
tile's borders; for each band the pixels that it reads are copied together. Where the tile alone
would need a padding that PyTorch refuses, one band holds everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor
from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import empty_for, shape_of, view_of
from spatialdl.parallel.layout import Box, Interval, Window, last_slices


@dataclass(frozen=True)
class Interior:
    """The outputs that the tile gives by itself.

    Attributes:
        padding: with which it is pooled, a number for each dim.
        outputs: which of the rank's outputs these are.
        given: where they lie among all that the tile gives.
        size: of all that the tile gives.
    """

    padding: tuple[int, ...]
    outputs: tuple[slice, ...]
    given: tuple[slice, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class BorderBand:
    """Outputs that read other ranks' pixels.

    Attributes:
        outputs: which of the rank's outputs these are.
        box: what they read; may reach outside the image.
    """

    outputs: tuple[slice, ...]
    box: Box

    def of(self, y: Tensor) -> Tensor:
        return y[last_slices(self.outputs)]

    def window(
        self, tile: Tensor, plan: Plan, arrivals: Sequence[BoxedTensor], fill: float
    ) -> Tensor:
        """What the band reads, copied together; `fill` outside the image."""
        window = empty_for(tile, shape_of(tile, self.box))
        for outside in plan.unowned:
            common = self.box.intersect(outside)
            if not common.is_empty:
                view_of(window, self.box, common).fill_(fill)
        for source in (BoxedTensor(tile, plan.own), *arrivals):
            common = self.box.intersect(source.box)
            if not common.is_empty:
                view_of(window, self.box, common).copy_(source.view(common))
        return window

    def add_to(self, target: BoxedTensor, grad: Tensor) -> None:
        """Add the part of the window's gradient that is the target's."""
        common = self.box.intersect(target.box)
        if not common.is_empty:
            target.view(common).add_(view_of(grad, self.box, common))


@dataclass(frozen=True)
class OutputParts:
    """Every output of a rank once.

    Attributes:
        alone: None where one band holds everything, or the rank has no outputs.
        bands: before and after the tile in each dim, None where there is none: as many on all
            ranks, which must keep as many tensors.
    """

    alone: Interior | None
    bands: tuple[BorderBand | None, ...]


@lru_cache(maxsize=4096)
def parts_of(
    own: Box, outputs: Box, size: tuple[int, ...], windows: tuple[Window, ...]
) -> OutputParts:
    """How the rank that has the tile `own` of an image of `size` gets the box `outputs`."""
    none: tuple[BorderBand | None, ...] = (None,) * (2 * len(windows))
    if outputs.is_empty:
        return OutputParts(None, none)
    each = zip(own.spatial, outputs.spatial, size, windows, strict=True)
    alone = [_alone(*one) for one in each] if not own.is_empty else [None]
    inner = [one for one in alone if one is not None]
    if len(inner) < len(windows):
        return OutputParts(None, (_band(outputs, outputs.spatial, windows), *none[1:]))
    bands = [
        _band(outputs, intervals, windows)
        for dim in range(len(windows))
        for intervals in _sides(outputs.spatial, [one.outputs for one in inner], dim)
    ]
    firsts = [start for start, _ in outputs.spatial]
    return OutputParts(
        Interior(
            tuple(one.padding for one in inner),
            tuple(_slice(one.outputs, first) for one, first in zip(inner, firsts, strict=True)),
            tuple(slice(one.skip, one.skip + one.count) for one in inner),
            tuple(one.given for one in inner),
        ),
        tuple(bands),
    )


@dataclass(frozen=True)
class _Inner:
    """One dim of `Interior`: `outputs` in the global image, `skip` before them of those `given`."""

    outputs: Interval
    padding: int
    skip: int
    given: int

    @property
    def count(self) -> int:
        return self.outputs[1] - self.outputs[0]


def _alone(tile: Interval, outputs: Interval, size: int, window: Window) -> _Inner | None:
    """The outputs that read no other tile in this dim; None if the tile cannot give them."""
    (start, stop), (first, last) = tile, outputs
    if start > 0:
        first = max(first, -(-(start + window.padding) // window.stride))
    if stop < size:
        last = min(last, (stop + window.padding - window.reach) // window.stride + 1)
    if first >= last or stop - start < window.kernel:  # which PyTorch's avg_pool3d refuses
        return None
    for padding in range(window.kernel // 2 + 1):  # more PyTorch refuses
        lead = first * window.stride - window.padding - start + padding
        skip, rest = divmod(lead, window.stride)
        given = (stop - start + 2 * padding - window.reach) // window.stride + 1
        if rest == 0 and skip >= 0 and given >= skip + last - first:
            return _Inner((first, last), padding, skip, given)
    return None


def _sides(
    outputs: Sequence[Interval], inner: Sequence[Interval], dim: int
) -> Iterator[tuple[Interval, ...]]:
    """Before and after the inner outputs of `dim`: inner in earlier dims, all in later ones."""
    (start, stop), (first, last) = outputs[dim], inner[dim]
    for side in ((start, first), (last, stop)):
        yield (*inner[:dim], side, *outputs[dim + 1 :])


def _band(
    outputs: Box, wanted: Sequence[Interval], windows: tuple[Window, ...]
) -> BorderBand | None:
    if any(start >= stop for start, stop in wanted):
        return None
    slices = (_slice(one, start) for one, (start, _) in zip(wanted, outputs.spatial, strict=True))
    read = (window.needs(*one) for window, one in zip(windows, wanted, strict=True))
    return BorderBand(tuple(slices), Box((outputs[0], *read)))


def _slice(interval: Interval, first: int) -> slice:
    return slice(interval[0] - first, interval[1] - first)
