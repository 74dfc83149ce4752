"""Views that mix split dims with other dims, for which ranks exchange elements.

For example (N, H*W, C) viewed as (N, C, H, W) spreads the channels of one pixel over several
pixels. Elements keep their order in memory, so the tensor is moved from tiles to bands, each an
interval of this order, and from bands to the tiles of the new shape. No rank holds more than its
share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import repartition
from spatialdl.layout.layout import Box, Interval, Layout, even_bounds
from spatialdl.spatial.dims import SpatialDims, separate_dims
from spatialdl.spatial.sharing import share
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile


class _Order(NamedTuple):
    """A split tensor with separate spatial dims, and its bands.

    Attributes:
        sizes: the global shape.
        where: the spatial dims.
        slowest: the dim that is cut into bands: the first one after the unchanged dims.
        layout: of one sample.
    """

    sizes: tuple[int, ...]
    where: tuple[int, ...]
    slowest: int
    layout: Layout

    @classmethod
    def of(cls, shape: Sequence[int], dims: SpatialDims, layout: Layout, stay: int) -> _Order:
        sizes, where = separate_dims(shape, dims, layout.size)
        slowest = next((n for n in range(stay, len(sizes)) if sizes[n] > 1), stay)
        return cls(tuple(sizes), tuple(where), slowest, layout)

    @property
    def cuts_pixels(self) -> bool:
        return self.slowest in self.where

    def boxes(self) -> tuple[Box, ...]:
        """The boxes of the tiles: an interval of the slowest dim, or (0, 1), and the pixels."""
        return tuple(Box((self._first, *box.spatial)) for box in self.layout.boxes)

    def bands(self, ranks: int) -> tuple[Box, ...]:
        """The boxes of the bands."""
        whole = Box((self._first, *self.layout.whole.spatial))
        dim = 1 + self.where.index(self.slowest) if self.cuts_pixels else 0
        return tuple(whole.but(dim, interval) for interval in self._intervals(ranks))

    def lines(self, ranks: int) -> tuple[Box, ...]:
        """The bands as intervals of elements in memory order."""
        step = prod(self.sizes[self.slowest + 1 :])
        return tuple(
            Box(((0, 1), (start * step, stop * step))) for start, stop in self._intervals(ranks)
        )

    @property
    def _first(self) -> Interval:
        return (0, 1) if self.cuts_pixels else (0, self.sizes[self.slowest])

    def _intervals(self, ranks: int) -> list[Interval]:
        bounds = even_bounds(self.sizes[self.slowest], ranks)
        return list(pairwise(bounds))

    def move(self, own: Tensor, plan: Plan, mesh: Mesh) -> Tensor:
        """The elements that this rank needs by a plan between `boxes` and `bands`."""
        front = [] if self.cuts_pixels else [self.slowest]
        others = [n for n in range(len(self.sizes)) if n not in (*front, *self.where)]
        order = [*front, *others, *self.where]
        image = own.reshape(self._sizes_of(plan.own)).permute(order)
        image = repartition(
            image.unsqueeze(0) if self.cuts_pixels else image, mesh.grid_comm, plan, name="reshape"
        )
        image = image.squeeze(0) if self.cuts_pixels else image
        return image.permute([order.index(n) for n in range(len(order))])

    def _sizes_of(self, box: Box) -> list[int]:
        sizes = list(self.sizes)
        for dim, extent in zip(self.where, box.shape[1:], strict=True):
            sizes[dim] = extent
        if not self.cuts_pixels:
            sizes[self.slowest] = box.shape[0]
        return sizes


def reorder(x: SpatialTensor, shape: tuple[int, ...]) -> SpatialTensor | None:
    """`x` viewed as the global `shape`, on the same layout.

    Returns:
        None if `shape` has no dims for the spatial dims.
    """
    stay = _count_unchanged(tuple(x.shape), shape, x.spatial_dims)
    dims = _place_for(x.spatial_layout.size, shape, stay)
    if dims is None or x.spatial_dims.extra_tokens:
        return None
    mesh, layout = x.mesh, x.spatial_layout
    if mesh.grid_comm.size == 1:
        return from_tile(to_tile(x).reshape(shape), layout, mesh, dims)
    old = _Order.of(tuple(x.shape), x.spatial_dims, layout.of_samples(1), stay)
    new = _Order.of(shape, dims, layout.of_samples(1), stay)
    plans = _plans(old, new, mesh.grid_comm.size, mesh.part)
    band = old.move(to_tile(x), plans[0], mesh)
    line = band.reshape(1, prod(shape[:stay]), plans[1].own.shape[1])
    line = repartition(line, mesh.grid_comm, plans[1], name="reshape")
    tile = new.move(line, plans[2], mesh)
    extents = mesh.own_box(layout).shape[1:]
    view = from_tile(tile.reshape(dims.sizes(shape, extents)), layout, mesh, dims)
    share(x, view, moved=True)
    return view


def _count_unchanged(old: Sequence[int], new: Sequence[int], dims: SpatialDims) -> int:
    """The number of leading dims that are unchanged and not split."""
    count = 0
    while old[count] == new[count] and not dims.holds(count, len(old)):
        count += 1
    return count


def _place_for(size: Sequence[int], shape: Sequence[int], stay: int) -> SpatialDims | None:
    """The dims of `shape`, after `stay` unchanged ones, with the sizes of the spatial dims.

    The last such dims; if there are none, the last dim with as many elements as the image.
    """
    at: list[int] = []
    for extent in reversed(size):
        before = at[0] if at else 0
        fits = [n for n in range(stay - len(shape), before) if shape[n] == extent]
        if not fits:
            break
        at.insert(0, fits[-1])
    if len(at) == len(size):
        return SpatialDims.of(*at)
    merged = [n for n in range(stay - len(shape), 0) if shape[n] == prod(size)]
    return SpatialDims.of(*merged[-1:] * len(size)) if merged else None


@lru_cache(maxsize=4096)
def _plans(old: _Order, new: _Order, ranks: int, part: int) -> tuple[Plan, Plan, Plan]:
    """The plans from tiles to bands, to bands of the new shape, to its tiles."""
    return (
        plan_for(old.boxes(), old.bands(ranks), part),
        plan_for(old.lines(ranks), new.lines(ranks), part),
        plan_for(new.bands(ranks), new.boxes(), part),
    )
