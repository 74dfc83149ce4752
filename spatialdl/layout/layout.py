"""Boxes and layouts: the part of the global image that each rank owns.

Integer arithmetic without torch and MPI. Every rank computes the boxes of all ranks from the
global sizes, so no communication is needed to find owners. An image has one to three spatial
dims: a signal, an image, a volume.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import Any

Interval = tuple[int, int]
"""Half-open [start, stop)."""

Bounds = tuple[int, ...]
"""Part i of a dim is ``[bounds[i], bounds[i + 1])``; the first bound is 0, the last the size."""

LOPSIDED = 1.25
"""A layout is rebalanced if its largest part exceeds the even one by more than this factor."""


class Box(tuple[Interval, ...]):
    """A part of a global image: an interval of samples, then one of each spatial dim.

    A box that an operation *needs* may exceed the image (padding).
    """

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of samples, then the sizes of the spatial dims; never negative."""
        return tuple(max(0, stop - start) for start, stop in self)

    @property
    def spatial(self) -> tuple[Interval, ...]:
        """Intervals of the spatial dims."""
        return self[1:]

    @property
    def is_empty(self) -> bool:
        return any(stop <= start for start, stop in self)

    def intersect(self, other: Box) -> Box:
        """Intersection, which may be empty."""
        return Box(
            (max(start, first), min(stop, last))
            for (start, stop), (first, last) in zip(self, other, strict=True)
        )

    def but(self, dim: int, interval: Interval) -> Box:
        """This box with another interval of `dim`, where dim 0 is the samples."""
        return Box((*self[:dim], interval, *self[dim + 1 :]))

    def without(self, part: Box) -> tuple[Box, ...]:
        """Difference of this box and `part`, as boxes that do not overlap."""
        part = self.intersect(part)
        if part.is_empty:
            return () if self.is_empty else (self,)
        remaining: list[Box] = []
        rest = self
        for dim, ((start, stop), (first, last)) in enumerate(zip(self, part, strict=True)):
            remaining.append(rest.but(dim, (start, first)))
            remaining.append(rest.but(dim, (last, stop)))
            rest = rest.but(dim, (first, last))
        return tuple(box for box in remaining if not box.is_empty)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Slices of this box in a tensor that holds `outer`, one for each dim."""
        return tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(self, outer, strict=True)
        )


def last_slices(slices: Iterable[slice]) -> tuple[Any, ...]:
    """Index with these slices of the last dims, and all of the other dims."""
    return (..., *slices)


@lru_cache
def empty_box(spatial_dims: int) -> Box:
    """Empty box of an image with `spatial_dims` spatial dims."""
    return Box(((0, 0),) * (1 + spatial_dims))


def even_bounds(size: int, parts: int) -> Bounds:
    """Cut `size` into `parts` as evenly as possible: part i is [i*n//p, (i+1)*n//p)."""
    return tuple(part * size // parts for part in range(parts + 1))


def strided_bounds(bounds: Bounds, stride: int, size: int) -> Bounds:
    """Bounds of the output (of `size`) of a strided operation, aligned with its input's bounds.

    An output pixel belongs to the rank that owns the input pixel ``output * stride``, so that the
    result depends on (input bounds, stride, size) only and skip connections have equal bounds.
    """
    inner = [min(-(-bound // stride), size) for bound in bounds[1:-1]]
    return _rebalanced((0, *inner, size))


def scaled_bounds(bounds: Bounds, scale: int, size: int) -> Bounds:
    """Bounds of the output (of `size`) of an upsampling operation, aligned with its input's bounds.

    The inverse of `strided_bounds` where it exists: the decoder of a U-Net has the same bounds as
    the encoder at the same size.
    """
    inner = [min(bound * scale, size) for bound in bounds[1:-1]]
    return _rebalanced((0, *inner, size))


def _rebalanced(bounds: Bounds) -> Bounds:
    even = even_bounds(bounds[-1], len(bounds) - 1)
    return even if _largest(bounds) > LOPSIDED * _largest(even) else bounds


def _largest(bounds: Bounds) -> int:
    return max(stop - start for start, stop in pairwise(bounds))


@dataclass(frozen=True)
class Layout:
    """A global image cut along samples and spatial dims; parts in row-major order.

    Attributes:
        batch: bounds of the samples.
        cuts: bounds of each spatial dim.
    """

    batch: Bounds
    cuts: tuple[Bounds, ...]

    @classmethod
    def even(cls, samples: int, size: Sequence[int], grid: Sequence[int]) -> Layout:
        """Default layout: samples whole, each spatial dim cut evenly into the parts of `grid`."""
        cuts = (even_bounds(extent, parts) for extent, parts in zip(size, grid, strict=True))
        return cls((0, samples), tuple(cuts))

    @classmethod
    def of_ranks(
        cls, samples: int, size: Sequence[int], grid: Sequence[int], stream: Sequence[int]
    ) -> Layout:
        """Default layout on a grid of ranks with virtual tiles: parts consist of whole tiles.

        Args:
            stream: virtual tiles of a rank along each spatial dim; () for none.
        """
        if not stream:
            return cls.even(samples, size, grid)
        return cls.even(samples, size, finer_grid(grid, stream)).coarser(stream)

    @classmethod
    def by_sample(cls, samples: int, size: Sequence[int], parts: int) -> Layout:
        """Layout of whole images, with the samples cut evenly over `parts`."""
        return cls(even_bounds(samples, parts), tuple((0, extent) for extent in size))

    @property
    def samples(self) -> int:
        """Global number of samples."""
        return self.batch[-1]

    @cached_property
    def size(self) -> tuple[int, ...]:
        """Global spatial size."""
        return tuple(bounds[-1] for bounds in self.cuts)

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of parts along each spatial dim."""
        return tuple(len(bounds) - 1 for bounds in self.cuts)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Box of every part, in rank order."""
        return tuple(map(Box, product(*map(tuple, map(pairwise, (self.batch, *self.cuts))))))

    def of_samples(self, samples: int) -> Layout:
        """This layout with another number of samples."""
        if self.batch == (0, samples):
            return self
        return _of_samples(self, samples)

    def resized(self, along: int, size: int) -> Layout:
        """This layout with another size along one spatial dim, which is cut evenly."""
        if self.size[along] == size:
            return self
        cuts = list(self.cuts)
        cuts[along] = even_bounds(size, self.grid[along])
        return Layout(self.batch, tuple(cuts))

    def coarser(self, factors: Sequence[int]) -> Layout:
        """Layout that merges `factors` parts along each spatial dim into one."""
        each = zip(self.cuts, factors, strict=True)
        return Layout(self.batch, tuple(bounds[::factor] for bounds, factor in each))

    @property
    def whole(self) -> Box:
        return Box((0, bounds[-1]) for bounds in (self.batch, *self.cuts))

    @cached_property
    def _hash(self) -> int:
        return hash((self.batch, self.cuts))

    def __hash__(self) -> int:  # layouts are keys on every call of every operation
        return self._hash

    def part_at(self, part: int) -> tuple[int, ...]:
        """Grid coordinates of a part."""
        place = []
        for parts in reversed(self.grid):
            part, last = divmod(part, parts)
            place.append(last)
        return tuple(reversed(place))

    def strided(self, stride: Sequence[int], size: Sequence[int]) -> Layout:
        """Layout of the output (of spatial `size`) of a strided operation."""
        each = zip(self.cuts, stride, size, strict=True)
        return Layout(self.batch, tuple(strided_bounds(*one) for one in each))

    def scaled(self, scale: Sequence[int], size: Sequence[int]) -> Layout:
        """Layout of the output (of spatial `size`) of an upsampling operation."""
        each = zip(self.cuts, scale, size, strict=True)
        return Layout(self.batch, tuple(scaled_bounds(*one) for one in each))

    def describe(self) -> str:
        """Short description for messages: ``2x1 over 70x93``."""
        return f"{by(self.grid)} over {by(self.size)}"


def finer_grid(grid: Sequence[int], factors: Sequence[int]) -> tuple[int, ...]:
    """Grid with `factors` parts in each part of `grid`; unchanged if `factors` is ()."""
    if not factors:
        return tuple(grid)
    return tuple(parts * factor for parts, factor in zip(grid, factors, strict=True))


def finer_parts(grid: Sequence[int], factors: Sequence[int], part: int) -> tuple[int, ...]:
    """Parts of a finer layout that make up a part of a coarser one, in order.

    Args:
        grid: grid of the coarser layout.
        factors: number of finer parts in each coarser part, along each spatial dim.
        part: part of the coarser layout, in row-major order.
    """
    place = Layout.even(1, grid, grid).part_at(part)
    each = zip(place, factors, strict=True)
    ranges = (range(at * factor, (at + 1) * factor) for at, factor in each)
    return tuple(_number(finer, grid, factors) for finer in product(*ranges))


def _number(place: Sequence[int], grid: Sequence[int], factors: Sequence[int]) -> int:
    number = 0
    for at, parts, factor in zip(place, grid, factors, strict=True):
        number = number * parts * factor + at
    return number


_NAMES = {1: ("positions",), 2: ("rows", "columns"), 3: ("slices", "rows", "columns")}


def spatial_names(count: int) -> tuple[str, ...]:
    """Names of the spatial dims of a signal, an image or a volume, for messages."""
    return _NAMES[count]


def image_shape(count: int) -> str:
    """Shape of an image with `count` spatial dims, for messages: ``(N, C, H, W)``."""
    return f"(N, C, {', '.join('DHW'[-count:] if count > 1 else 'L')})"


def nearly_cubic(parts: int, dims: int = 2) -> tuple[int, ...]:
    """Grid closest to a square or cube, with most parts along the first dim."""
    if dims == 1:
        return (parts,)
    last = max(n for n in range(1, parts + 1) if parts % n == 0 and n**dims <= parts)
    return *nearly_cubic(parts // last, dims - 1), last


def by(sizes: Sequence[int]) -> str:
    """Format sizes: ``70x93``."""
    return "x".join(map(str, sizes))


@lru_cache(maxsize=4096)
def _of_samples(layout: Layout, samples: int) -> Layout:
    return Layout((0, samples), layout.cuts)


@dataclass(frozen=True)
class Window:
    """Input pixels that an output pixel of a convolution or pooling reads, in one dim."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Extent of the input pixels that one output pixel reads."""
        return self.dilation * (self.kernel - 1) + 1

    def output_size(self, size: int, ceil_mode: bool = False) -> int:
        """Output size for input `size`, by PyTorch's rules."""
        free = size + 2 * self.padding - self.reach
        count = (-(-free // self.stride) if ceil_mode else free // self.stride) + 1
        if ceil_mode and (count - 1) * self.stride >= size + self.padding:
            count -= 1  # the last window must start inside the image or its left padding
        return count

    def needs(self, start: int, stop: int) -> tuple[int, int]:
        """Input interval that output [start, stop) reads; may exceed the image."""
        if stop <= start:
            return 0, 0
        first = start * self.stride - self.padding
        return first, (stop - 1) * self.stride - self.padding + self.reach

    def transposed_size(self, size: int, extra: int = 0) -> int:
        """Output size of the transposed operation; `extra` is PyTorch's output padding."""
        return (size - 1) * self.stride - 2 * self.padding + self.reach + extra

    def transposed_needs(self, start: int, stop: int, size: int) -> tuple[int, int]:
        """Input interval, of `size`, that output [start, stop) of the transposed operation reads.

        Equals the outputs of the operation itself that read pixels of [start, stop).
        """
        first = max(0, -(-(start + self.padding - self.reach + 1) // self.stride))
        last = min(size, (stop - 1 + self.padding) // self.stride + 1)
        return (first, last) if start < stop and first < last else (0, 0)


@lru_cache(maxsize=4096)
def needed_boxes(output: Layout, windows: tuple[Window, ...]) -> tuple[Box, ...]:
    """Input box that each part of `output` needs; empty where a part has no output."""
    return tuple(
        empty_box(len(windows))
        if box.is_empty
        else Box((box[0], *(w.needs(*own) for w, own in zip(windows, box.spatial, strict=True))))
        for box in output.boxes
    )


@lru_cache(maxsize=4096)
def transposed_boxes(
    layout: Layout, output: Layout, windows: tuple[Window, ...]
) -> tuple[Box, ...]:
    """Box of an image on `layout` that each part of the transposed operation's `output` needs.

    Empty where a part has no output, or none of its outputs reads a pixel.
    """
    boxes = []
    for box in output.boxes:
        each = zip(windows, box.spatial, layout.size, strict=True)
        need = Box((box[0], *(window.transposed_needs(*own, size) for window, own, size in each)))
        boxes.append(empty_box(len(windows)) if need.is_empty else need)
    return tuple(boxes)
