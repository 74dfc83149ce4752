"""Moves pixels along spatial dims, for padding, slicing, flipping and rolling.

Each output row reads one input row, each output column one input column, given by a `DimMap` per
dim, in segments. A rank needs the input between the first and the last index that its outputs
read. The boxes of all ranks follow from the sizes alone. Flipping and repeating pixels is local.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import repartition, view_of
from spatialdl.layout.layout import Bounds, Box, Layout, spatial_names, strided_bounds
from spatialdl.spatial.dims import from_image, image_dims, to_image
from spatialdl.spatial.sharing import share
from spatialdl.spatial.table import refusal
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile


class Segment(NamedTuple):
    """Consecutive outputs, the `k`-th of which reads input ``first + k * step``.

    Attributes:
        length: number of outputs.
        first: the input of the first output; inputs outside the image are a fill value.
        step: 1, greater for strided slices, negative for flips, 0 to repeat one input.
    """

    length: int
    first: int
    step: int = 1

    def part(self, start: int, stop: int) -> Segment:
        """Outputs [start, stop) of this segment, clipped to its length."""
        start, stop = max(start, 0), min(stop, self.length)
        if stop <= start:
            return Segment(0, 0, self.step)
        return Segment(stop - start, self.first + start * self.step, self.step)

    @property
    def reads(self) -> tuple[int, int]:
        """The half-open input interval read."""
        last = self.first + (self.length - 1) * self.step
        return min(self.first, last), max(self.first, last) + 1


@dataclass(frozen=True)
class DimMap:
    """The inputs of the outputs along one spatial dim.

    Attributes:
        segments: all outputs in order.
        bounds: the cuts of the output.
    """

    segments: tuple[Segment, ...]
    bounds: Bounds

    @classmethod
    def of(cls, segments: Sequence[Segment], bounds: Bounds, stride: int = 1) -> DimMap:
        """The map for an input cut at `bounds`: output ``o`` is where input ``o * stride`` is."""
        kept = tuple(s for s in segments if s.length > 0) or (Segment(0, 0),)
        size = sum(segment.length for segment in kept)
        return cls(kept, strided_bounds(bounds, stride, size))

    @classmethod
    def identity(cls, bounds: Bounds) -> DimMap:
        return cls((Segment(bounds[-1], 0),), bounds)

    def parts(self, start: int, stop: int) -> list[Segment]:
        """The part, possibly empty, of each segment in outputs [start, stop)."""
        parts, offset = [], 0
        for segment in self.segments:
            parts.append(segment.part(start - offset, stop - offset))
            offset += segment.length
        return parts


def _hull(parts: Sequence[Segment]) -> tuple[int, int]:
    """The interval from the first to the last input that the parts read."""
    reads = [part.reads for part in parts if part.length]
    if not reads:
        return 0, 0
    return min(start for start, _ in reads), max(stop for _, stop in reads)


@lru_cache(maxsize=4096)
def _groups(dim: DimMap) -> tuple[slice, ...]:
    """Groups of neighbouring segments that are fetched together.

    Segments are grouped if they are adjacent in the input for every rank, as in reflecting padding.
    For distant segments, as in circular padding, all pixels in between would be fetched too.
    """
    groups = [slice(0, 1)]
    ranks = [dim.parts(*interval) for interval in pairwise(dim.bounds)]
    for number in range(1, len(dim.segments)):
        wider = slice(groups[-1].start, number + 1)
        if all(_is_dense(parts[wider]) for parts in ranks):
            groups[-1] = wider
        else:
            groups.append(slice(number, number + 1))
    return tuple(groups)


def _is_dense(parts: Sequence[Segment]) -> bool:
    start, stop = _hull(parts)
    return stop - start <= sum(part.length for part in parts)


class _Fetch(NamedTuple):
    """One repartition, and the segments read of each spatial dim of the resulting box."""

    plan: Plan
    reads: tuple[tuple[Segment, ...], ...]


@lru_cache(maxsize=4096)
def _fetches(layout: Layout, maps: tuple[DimMap, ...], part: int) -> tuple[_Fetch, ...]:
    """All repartitions, equally many on all ranks; at most one dim may have several groups."""
    fetches = []
    for groups in product(*map(_groups, maps)):
        read = [
            tuple(
                tuple(dim.parts(*own)[group])
                for dim, group, own in zip(maps, groups, box, strict=True)
            )
            for box in product(*(pairwise(dim.bounds) for dim in maps))
        ]
        needed = tuple(Box(((0, 1), *map(_hull, each))) for each in read)
        origins = [start for start, _ in needed[part].spatial]
        fetches.append(
            _Fetch(plan_for(layout.boxes, needed, part), tuple(map(_relative, read[part], origins)))
        )
    return tuple(fetches)


def _relative(parts: Sequence[Segment], origin: int) -> tuple[Segment, ...]:
    return tuple(Segment(n, first - origin, step) for n, first, step in parts if n)


def take(tensor: Tensor, segments: Sequence[Segment], dim: int) -> Tensor:
    """The entries that `segments` read of a dim (negative) of a plain tensor."""
    pieces = [_piece(tensor, segment, dim) for segment in segments if segment.length]
    if not pieces:
        return tensor.narrow(dim, 0, 0)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _piece(tensor: Tensor, segment: Segment, dim: int) -> Tensor:
    start, stop = segment.reads
    after = (slice(None),) * (-dim - 1)
    if segment.step == 0:
        shape = list(tensor.shape)
        shape[dim] = segment.length
        return tensor.narrow(dim, start, 1).expand(shape)
    every: tuple[Any, ...] = (..., slice(start, stop, abs(segment.step)), *after)
    piece = tensor[every]
    return piece.flip(dim) if segment.step < 0 else piece


def fetch(image: Tensor, plan: Plan, mesh: Mesh, fill: float = 0.0, name: str = "") -> Tensor:
    """The box that this rank needs of (..., *spatial), by a plan for boxes of one sample.

    A view of the tile if every rank's tile contains its box.
    """
    if stays(plan):
        return view_of(image.unsqueeze(0), plan.own, plan.need).squeeze(0)
    return repartition(image.unsqueeze(0), mesh.grid_comm, plan, fill, name).squeeze(0)


@lru_cache(maxsize=4096)
def stays(plan: Plan) -> bool:
    """Whether every rank's tile contains its box; equal on every rank."""
    return not plan.communicates and all(
        own_start <= start <= stop <= own_stop
        for own, need in zip(plan.owned, plan.needed, strict=True)
        for (own_start, own_stop), (start, stop) in zip(own.spatial, need.spatial, strict=True)
    )


def separate_dims_of(
    func: object, x: SpatialTensor, touched: Collection[int] | None = None
) -> tuple[int, ...]:
    """The dims (negative) that hold the spatial dims, each separately.

    Args:
        touched: the dims along which pixels move; by default all.

    Raises:
        UnsupportedSpatialOp: these are merged into tokens or with other dims.
    """
    dims = x.spatial_dims
    merged = dims.extra_tokens or any(
        outer > 1 or dims.at.count(at) > 1
        for at, outer in zip(dims.at, dims.outer, strict=True)
        if touched is None or at in touched
    )
    if merged:
        names = " and ".join(spatial_names(len(x.spatial_dims.at)))
        raise refusal(func, [x], f"view it with {names} as separate dims first")
    return dims.at


def reindex(
    func: object,
    x: SpatialTensor,
    maps: tuple[DimMap, ...],
    fill: float = 0.0,
    is_view: bool = False,
) -> SpatialTensor:
    """`x` reindexed along its spatial dims; differentiable.

    Args:
        func: the operation, for messages.
        maps: the inputs of the outputs along each spatial dim.
        fill: the value of pixels outside the image.
        is_view: whether PyTorch returns a view of `x`, which users may write to.
    """
    layout = x.spatial_layout
    if maps == tuple(map(DimMap.identity, layout.cuts)):
        return x
    each = zip(x.spatial_dims.at, maps, layout.cuts, strict=True)
    separate_dims_of(func, x, {dim for dim, one, cuts in each if one != DimMap.identity(cuts)})
    name = getattr(func, "__name__", str(func))
    tile = to_tile(x)
    image = to_image(tile, x.spatial_dims, x.mesh.own_box(layout).shape[1:])
    for now in _passes(layout, maps):
        image = _pass(image, layout, now, x.mesh, fill, name)
        layout = Layout(layout.batch, tuple(dim.bounds for dim in now))
    if not is_view and image.untyped_storage().data_ptr() == tile.untyped_storage().data_ptr():
        image = image.clone()
    moved = from_image(image, x.spatial_dims, tile.shape)
    result = from_tile(moved, layout, x.mesh, x.spatial_dims)
    if is_view and not _stays(x, maps):
        share(x, result, moved=True)
    return result


@lru_cache(maxsize=4096)
def _passes(layout: Layout, maps: tuple[DimMap, ...]) -> tuple[tuple[DimMap, ...], ...]:
    """`maps` decomposed into passes in which at most one dim has several groups."""
    several = [dim for dim, each in enumerate(maps) if len(_groups(each)) > 1]
    cuts, left, passes = list(layout.cuts), list(maps), []
    for dim in several[:-1]:
        now = list(map(DimMap.identity, cuts))
        now[dim] = left[dim]
        passes.append(tuple(now))
        cuts[dim] = left[dim].bounds
        left[dim] = DimMap.identity(cuts[dim])
    return (*passes, tuple(left))


def _stays(x: SpatialTensor, maps: tuple[DimMap, ...]) -> bool:
    """Whether slices move no pixels between ranks; equal on every rank."""
    fetches = _fetches(x.spatial_layout.of_samples(1), maps, x.mesh.part)
    return all(stays(fetch.plan) for fetch in fetches)


def _pass(
    image: Tensor, layout: Layout, maps: tuple[DimMap, ...], mesh: Mesh, fill: float, name: str
) -> Tensor:
    pieces = []
    for plan, reads in _fetches(layout.of_samples(1), maps, mesh.part):
        box = fetch(image, plan, mesh, fill, name)
        for dim, segments in zip(image_dims(len(maps)).at, reads, strict=True):
            box = take(box, segments, dim)
        pieces.append(box)
    if len(pieces) == 1:
        return pieces[0]
    several = next(dim for dim, each in enumerate(maps) if len(_groups(each)) > 1)
    return torch.cat(pieces, several - len(maps))
