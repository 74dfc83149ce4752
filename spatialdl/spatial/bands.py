"""The outputs of a pooled tile: an interior, and bands that read other tiles.

Most windows lie in the tile and the padding around the image. Their outputs, the interior, are
computed from the tile, without a copy of it, while the halos are exchanged. The rest lie in thin
bands along the tile's borders, for which the inputs are copied to one buffer. If pooling the tile
would need a padding that PyTorch refuses, one band contains all outputs.
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
    """The outputs that need only the tile.

    Attributes:
        padding: of the tile, a number for each dim.
        outputs: their slices in the rank's outputs.
        computed: their slices in the outputs of the padded tile.
        size: of the outputs of the padded tile.
    """

    padding: tuple[int, ...]
    outputs: tuple[slice, ...]
    computed: tuple[slice, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class BorderBand:
    """Outputs that read pixels of other ranks.

    Attributes:
        outputs: their slices in the rank's outputs.
        box: their inputs; may extend beyond the image.
    """

    outputs: tuple[slice, ...]
    box: Box

    def of(self, y: Tensor) -> Tensor:
        return y[last_slices(self.outputs)]

    def window(
        self, tile: Tensor, plan: Plan, arrivals: Sequence[BoxedTensor], fill: float
    ) -> Tensor:
        """The inputs of the band in one buffer; `fill` outside the image."""
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
        """Add the part of the window's gradient that overlaps the target."""
        common = self.box.intersect(target.box)
        if not common.is_empty:
            target.view(common).add_(view_of(grad, self.box, common))


@dataclass(frozen=True)
class OutputParts:
    """A partition of the outputs of a rank.

    Attributes:
        alone: the interior; None if one band contains all outputs or there are none.
        bands: before and after the tile in each dim, or None; equally many on all ranks, which must
            save as many tensors.
    """

    alone: Interior | None
    bands: tuple[BorderBand | None, ...]


@lru_cache(maxsize=4096)
def parts_of(
    own: Box, outputs: Box, size: tuple[int, ...], windows: tuple[Window, ...]
) -> OutputParts:
    """The parts of the box `outputs` of the rank with the tile `own` of an image of `size`."""
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
            tuple(one.computed for one in inner),
        ),
        tuple(bands),
    )


@dataclass(frozen=True)
class _Inner:
    """One dim of `Interior`: global `outputs`, after `skip` of the tile's `computed`."""

    outputs: Interval
    padding: int
    skip: int
    computed: int

    @property
    def count(self) -> int:
        return self.outputs[1] - self.outputs[0]


def _alone(tile: Interval, outputs: Interval, size: int, window: Window) -> _Inner | None:
    """The outputs that read no other tile in this dim; None if the tile cannot be pooled."""
    (start, stop), (first, last) = tile, outputs
    if start > 0:
        first = max(first, -(-(start + window.padding) // window.stride))
    if stop < size:
        last = min(last, (stop + window.padding - window.reach) // window.stride + 1)
    if first >= last or stop - start < window.kernel:  # refused by PyTorch's avg_pool3d
        return None
    for padding in range(window.kernel // 2 + 1):  # PyTorch's limit
        lead = first * window.stride - window.padding - start + padding
        skip, rest = divmod(lead, window.stride)
        computed = (stop - start + 2 * padding - window.reach) // window.stride + 1
        if rest == 0 and skip >= 0 and computed >= skip + last - first:
            return _Inner((first, last), padding, skip, computed)
    return None


def _sides(
    outputs: Sequence[Interval], inner: Sequence[Interval], dim: int
) -> Iterator[tuple[Interval, ...]]:
    """The intervals before and after the inner outputs of `dim`.

    They cover the inner outputs of earlier dims and all outputs of later ones.
    """
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
