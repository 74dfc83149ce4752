"""The geometry of a convolution that overlaps with its halo exchange.

A convolution is linear in its input. So the tile, padded with zeros, is convolved while the halos
are exchanged. The contributions of the halo strips are added afterwards to the few output rows and
columns that they touch. No padded copy of the tile is made.

This module computes, in integers, the padding with which the tile yields the wanted outputs, and
the outputs and kernel taps that each strip touches: for one dim, then for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor
from spatialdl.comm.repartition import shape_of
from spatialdl.layout.layout import Bounds, Box, Layout, Window, last_slices


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


# --- all dims of a tile


@dataclass(frozen=True)
class Edge:
    """A halo strip of the tile, and the outputs and kernel taps that read it.

    Attributes:
        box: the pixels of the strip.
        strips: the strip in each spatial dim.
    """

    box: Box
    strips: tuple[Strip, ...]

    def outputs_of(self, y: Tensor) -> Tensor:
        return y[last_slices(strip.outputs for strip in self.strips)]

    def taps_of(self, weight: Tensor) -> Tensor:
        return weight[last_slices(strip.taps for strip in self.strips)]

    def read_from(self, buffer: Tensor) -> Tensor:
        """The part of the strip's buffer that the taps read."""
        return buffer[last_slices(slice(strip.first, strip.last) for strip in self.strips)]


@dataclass(frozen=True)
class TileGeometry:
    """The geometry of a convolution of one rank's tile, and its halo strips.

    Attributes:
        cuts: one per spatial dim.
        edges: before and after the tile in the first dim, in the second, and so on.
        outside: for each strip its number, its part outside the tile (None: all), and its box.
    """

    cuts: tuple[Cut, ...]
    edges: tuple[Edge | None, ...]
    outside: tuple[tuple[int, tuple[slice, ...] | None, Box], ...]

    @property
    def padding(self) -> tuple[int, ...]:
        return tuple(cut.padding for cut in self.cuts)

    @property
    def skips(self) -> bool:
        """Whether convolving the tile alone yields outputs before this rank's."""
        return any(cut.skip for cut in self.cuts)

    def select_outputs(self, y: Tensor) -> Tensor:
        """This rank's outputs, of all outputs of the tile alone."""
        return y[last_slices(slice(cut.skip, cut.skip + cut.outputs) for cut in self.cuts)]

    def strips(self, like: Tensor) -> list[Tensor]:
        """A zero buffer per strip, empty if there is none: all ranks save as many tensors."""
        return [
            like.new_zeros(shape_of(like, edge.box)) if edge else _no_strip(like.dtype, like.device)
            for edge in self.edges
        ]

    def outside_strips(self, strips: list[Tensor]) -> list[BoxedTensor]:
        """The parts of the strips outside the tile, which receive halos, with their boxes.

        Strips of the first dim come first and hold the corners. A strip may span the whole tile
        and extend beyond it, if this rank owns outputs of a neighbour's pixels: the pixels beyond
        belong to another strip.
        """
        return [
            BoxedTensor(strips[side] if inner is None else strips[side][last_slices(inner)], box)
            for side, inner, box in self.outside
        ]


@lru_cache(maxsize=64)
def _no_strip(dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty buffer, cached: creating one takes some microseconds of an exchange."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def _outside(box: Box, own: Box, side: int) -> Box:
    """The part of `box` before the tile `own` (even sides) or after it in its dim ``side // 2``."""
    dim = 1 + side // 2
    (start, stop), (first, last) = box[dim], own[dim]
    return box.but(dim, (max(start, last), stop) if side % 2 else (start, min(stop, first)))


@lru_cache(maxsize=4096)
def tile_geometry(
    layout: Layout, output: Layout, windows: tuple[Window, ...], part: int
) -> TileGeometry | None:
    """This rank's geometry; None on all ranks if `cut_dim` does not support any tile."""
    cuts = []
    for tiles, outputs, window, place in zip(
        layout.cuts, output.cuts, windows, layout.part_at(part), strict=True
    ):
        of_all = cut_dim(tiles, outputs, window)
        if of_all is None:
            return None
        cuts.append(of_all[place])
    edges = tuple(
        _edge(tuple(cuts), dim, strip, layout.samples)
        for dim, cut in enumerate(cuts)
        for strip in (cut.before, cut.after)
    )
    return TileGeometry(tuple(cuts), edges, tuple(_outside_parts(edges, layout.boxes[part])))


def _edge(cuts: tuple[Cut, ...], dim: int, strip: Strip | None, samples: int) -> Edge | None:
    """The strip of one dim, over the full extent of the other dims."""
    if strip is None:
        return None
    strips = tuple(strip if number == dim else cut.full for number, cut in enumerate(cuts))
    return Edge(Box(((0, samples), *((one.start, one.stop) for one in strips))), strips)


def _outside_parts(
    edges: tuple[Edge | None, ...], own: Box
) -> Iterator[tuple[int, tuple[slice, ...] | None, Box]]:
    for side, edge in enumerate(edges):
        if edge is not None:
            box = _outside(edge.box, own, side)
            yield side, None if box == edge.box else box.slices_in(edge.box)[1:], box
