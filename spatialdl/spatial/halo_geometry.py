"""The geometry of a convolution on a tile whose neighbours' pixels come later.

A convolution is linear in its input. So it may run on the tile alone, as if zeros surrounded it,
while the halos travel; what the halo strips contribute is added afterwards to the few output rows
and columns that they touch. No padded copy of the tile is made.

This file says, for one dim, with which padding the tile alone gives the wanted outputs, and which
outputs and kernel taps each strip touches. Integers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from spatialdl.parallel.layout import Bounds, Window


@dataclass(frozen=True)
class Strip:
    """One side's halo in one dim: what to keep of it, and what it touches.

    Attributes:
        start, stop: input interval, in global pixels, that the buffer holds.
        first, last: the part of the buffer that is read, from the first tap of the first output
            that the strip touches to the last tap of the last; outputs of a neighbour may read on.
        outputs: the tile's outputs that the strip touches.
        taps: the kernel taps that reach into the strip.
    """

    start: int
    stop: int
    first: int
    last: int
    outputs: slice
    taps: slice


@dataclass(frozen=True)
class Cut:
    """One dim of a convolution on one tile.

    Attributes:
        padding: with which the tile alone is convolved, on both sides.
        skip: outputs at the start that this gives too much.
        outputs: outputs wanted.
        full: all outputs and all taps, for strips of other dims.
        before, after: the halo strips, None where no pixel of the image is missing.
    """

    padding: int
    skip: int
    outputs: int
    full: Strip
    before: Strip | None
    after: Strip | None


@lru_cache(maxsize=4096)
def cut_dim(tiles: Bounds, outputs: Bounds, window: Window) -> tuple[Cut, ...] | None:
    """The cuts of all parts of a dim; None if any part is too odd for it.

    Odd are parts without pixels or outputs, and outputs that lie far from their tile. All ranks
    come to the same answer.
    """
    cuts = []
    for tile, output in zip(pairwise(tiles), pairwise(outputs), strict=True):
        cut = _cut(tile, output, tiles[-1], window)
        if cut is None:
            return None
        cuts.append(cut)
    return tuple(cuts)


def _cut(tile: tuple[int, int], output: tuple[int, int], size: int, window: Window) -> Cut | None:
    if tile[0] == tile[1] or output[0] == output[1]:
        return None
    start, stop = window.needs(*output)
    lead = tile[0] - start
    outputs = output[1] - output[0]
    padding = _padding(tile[1] - tile[0], lead, outputs, window)
    if padding is None:
        return None
    return Cut(
        padding=padding,
        skip=(padding - lead) // window.stride,
        outputs=outputs,
        full=Strip(start, stop, 0, stop - start, slice(0, outputs), slice(0, window.kernel)),
        before=_before(start, tile[0], outputs, window) if max(start, 0) < tile[0] else None,
        after=_after(start, stop, tile[1], outputs, window) if min(stop, size) > tile[1] else None,
    )


def _padding(extent: int, lead: int, outputs: int, window: Window) -> int | None:
    """The smallest padding that puts an output where the first wanted one is, and gives enough."""
    for padding in range(max(lead, 0), max(lead, 0) + window.reach + window.stride):
        skip, rest = divmod(padding - lead, window.stride)
        free = extent + 2 * padding - window.reach
        if rest == 0 and free >= 0 and free // window.stride + 1 >= skip + outputs:
            return padding if padding < window.reach + window.stride else None
    return None


def _before(start: int, edge: int, outputs: int, window: Window) -> Strip:
    """The strip [.., edge) before the tile; `start` is the first tap of the first output."""
    lead = edge - start
    touched = min(outputs, -(-lead // window.stride))
    taps = min(window.kernel, -(-lead // window.dilation))
    stop = start + (touched - 1) * window.stride + window.dilation * (taps - 1) + 1
    return Strip(start, max(stop, edge), 0, stop - start, slice(0, touched), slice(0, taps))


def _after(start: int, stop: int, edge: int, outputs: int, window: Window) -> Strip:
    """The strip [edge, ..) after the tile."""
    touched = max(0, -(-(edge - start - window.reach + 1) // window.stride))
    last = start + (outputs - 1) * window.stride
    taps = max(0, -(-(edge - last) // window.dilation))
    first = start + touched * window.stride + window.dilation * taps
    return Strip(
        min(first, edge),
        stop,
        first - min(first, edge),
        stop - min(first, edge),
        slice(touched, outputs),
        slice(taps, window.kernel),
    )
