"""The geometry of a convolution that overlaps with its halo exchange.

A convolution is linear in its input. So the tile, padded with zeros, is convolved while the halos
are exchanged. The contributions of the halo strips are added afterwards to the few output rows and
columns that they touch. No padded copy of the tile is made.

This module computes, in integers and for one dim, the padding with which the tile yields the wanted
outputs, and the outputs and kernel taps that each strip touches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from spatialdl.parallel.layout import Bounds, Window


@dataclass(frozen=True)
class Strip:
    """The halo of one side in one dim, and the outputs and taps that it touches.

    Attributes:
        start, stop: input interval, in global pixels, of the buffer.
        first, last: the part of the buffer that is read, from the first tap of the first output
            that the strip touches to the last tap of the last one; the rest belongs to outputs of
            a neighbour.
        outputs: the tile's outputs that the strip touches.
        taps: the kernel taps that read the strip.
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
        padding: zero padding of the tile on both sides.
        skip: number of surplus outputs at the start.
        outputs: number of wanted outputs.
        full: all outputs and all taps, for strips of other dims.
        before, after: the halo strips; None if the tile contains all pixels needed on this side.
    """

    padding: int
    skip: int
    outputs: int
    full: Strip
    before: Strip | None
    after: Strip | None


@lru_cache(maxsize=4096)
def cut_dim(tiles: Bounds, outputs: Bounds, window: Window) -> tuple[Cut, ...] | None:
    """The cuts of all parts of a dim; None if any part is not supported.

    Not supported are parts without pixels or outputs, and outputs far from their tile. The result
    is the same on all ranks.
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
    """The smallest padding that aligns outputs with the first wanted one and yields enough."""
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
