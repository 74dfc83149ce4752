"""Boxes and layouts: which rank owns which rectangle of the global image.

Pure arithmetic on integers, no torch and no MPI. Every rank computes the boxes of all ranks from
the global sizes alone, so that nobody ever has to ask who owns what.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

Bounds = tuple[int, ...]
"""Part i of a dim is ``[bounds[i], bounds[i + 1])``; first is 0, last is the size."""

LOPSIDED = 1.25
"""A layout whose largest part exceeds the even one by more than this factor is rebalanced."""


class Box(NamedTuple):
    """A half-open rectangle of a global image: samples, rows, columns.

    A box that an operation *needs* may reach outside the image (padding).
    """

    batch0: int
    batch1: int
    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Samples, rows, columns; never negative."""
        return (
            max(0, self.batch1 - self.batch0),
            max(0, self.row1 - self.row0),
            max(0, self.col1 - self.col0),
        )

    @property
    def is_empty(self) -> bool:
        return self.batch1 <= self.batch0 or self.row1 <= self.row0 or self.col1 <= self.col0

    def intersect(self, other: Box) -> Box:
        """The common part, which may be empty."""
        return Box(
            max(self.batch0, other.batch0),
            min(self.batch1, other.batch1),
            max(self.row0, other.row0),
            min(self.row1, other.row1),
            max(self.col0, other.col0),
            min(self.col1, other.col1),
        )

    def without(self, part: Box) -> tuple[Box, ...]:
        """What is left of this box when `part` is cut out of it, in boxes that do not overlap."""
        part = self.intersect(part)
        if part.is_empty:
            return () if self.is_empty else (self,)
        left: list[Box] = []
        rest = self
        for start, stop in (("batch0", "batch1"), ("row0", "row1"), ("col0", "col1")):
            first, last = getattr(part, start), getattr(part, stop)
            left.append(rest._replace(**{stop: first}))
            left.append(rest._replace(**{start: last}))
            rest = rest._replace(**{start: first, stop: last})
        return tuple(box for box in left if not box.is_empty)

    def slices_in(self, outer: Box) -> tuple[slice, slice, slice]:
        """Where this box lies in a tensor that holds `outer`: (batch, rows, columns)."""
        return (
            slice(self.batch0 - outer.batch0, self.batch1 - outer.batch0),
            slice(self.row0 - outer.row0, self.row1 - outer.row0),
            slice(self.col0 - outer.col0, self.col1 - outer.col0),
        )


EMPTY_BOX = Box(0, 0, 0, 0, 0, 0)


def even_bounds(size: int, parts: int) -> Bounds:
    """Cut `size` into `parts` as evenly as integers allow: part i is [i*n//p, (i+1)*n//p)."""
    return tuple(part * size // parts for part in range(parts + 1))


def strided_bounds(bounds: Bounds, stride: int, size: int) -> Bounds:
    """Cut the output (of `size`) of an operation with `stride` where its input was cut.

    An output pixel goes to the rank that owns the input pixel ``output * stride``, so that the
    result depends on (input bounds, stride, size) only and skip connections meet on the same cut.
    """
    inner = [min(-(-bound // stride), size) for bound in bounds[1:-1]]
    return _rebalanced((0, *inner, size))


def scaled_bounds(bounds: Bounds, scale: int, size: int) -> Bounds:
    """Cut the output (of `size`) of an operation that enlarges where its input was cut.

    The inverse of `strided_bounds` where it has one: on the way up a U-Net meets the cut that it
    had at the same size on the way down.
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
    """A global image cut along samples, rows and columns; parts in row-major order."""

    batch: Bounds
    rows: Bounds
    cols: Bounds

    @classmethod
    def even(cls, size: tuple[int, int, int], grid: tuple[int, int]) -> Layout:
        """The default layout: samples whole, rows and columns cut evenly over `grid`."""
        samples, height, width = size
        return cls((0, samples), even_bounds(height, grid[0]), even_bounds(width, grid[1]))

    @classmethod
    def by_sample(cls, size: tuple[int, int, int], parts: int) -> Layout:
        """Whole images, the samples cut evenly over `parts`."""
        samples, height, width = size
        return cls(even_bounds(samples, parts), (0, height), (0, width))

    @property
    def size(self) -> tuple[int, int, int]:
        """Global samples, rows, columns."""
        return self.batch[-1], self.rows[-1], self.cols[-1]

    @property
    def grid(self) -> tuple[int, int]:
        return len(self.rows) - 1, len(self.cols) - 1

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The box of every part, in the order of the ranks."""
        return tuple(
            Box(*samples, *rows, *cols)
            for samples in pairwise(self.batch)
            for rows in pairwise(self.rows)
            for cols in pairwise(self.cols)
        )

    def of_samples(self, samples: int) -> Layout:
        """The same cut of rows and columns for another number of samples."""
        if self.batch == (0, samples):
            return self
        return _of_samples(self, samples)

    @property
    def whole(self) -> Box:
        samples, height, width = self.size
        return Box(0, samples, 0, height, 0, width)

    @cached_property
    def _hash(self) -> int:
        return hash((self.batch, self.rows, self.cols))

    def __hash__(self) -> int:  # layouts are keys on every call of every operation
        return self._hash

    def strided(self, stride: tuple[int, int], size: tuple[int, int]) -> Layout:
        """The layout of the output (rows, columns = `size`) of an operation with `stride`."""
        return Layout(
            self.batch,
            strided_bounds(self.rows, stride[0], size[0]),
            strided_bounds(self.cols, stride[1], size[1]),
        )

    def scaled(self, scale: tuple[int, int], size: tuple[int, int]) -> Layout:
        """The layout of the output (rows, columns = `size`) of an operation that enlarges."""
        return Layout(
            self.batch,
            scaled_bounds(self.rows, scale[0], size[0]),
            scaled_bounds(self.cols, scale[1], size[1]),
        )

    def describe(self) -> str:
        """Short text for messages: ``2x1 over 70x93``."""
        rows, cols = self.grid
        return f"{rows}x{cols} over {self.size[1]}x{self.size[2]}"


@lru_cache(maxsize=4096)
def _of_samples(layout: Layout, samples: int) -> Layout:
    return Layout((0, samples), layout.rows, layout.cols)


@dataclass(frozen=True)
class Window:
    """The input pixels that an output pixel of a convolution or pooling reads, in one dim."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Input pixels from the first to the last that one output pixel reads."""
        return self.dilation * (self.kernel - 1) + 1

    def output_size(self, size: int, ceil_mode: bool = False) -> int:
        """Output pixels for `size` input pixels, as PyTorch counts them."""
        free = size + 2 * self.padding - self.reach
        count = (-(-free // self.stride) if ceil_mode else free // self.stride) + 1
        if ceil_mode and (count - 1) * self.stride >= size + self.padding:
            count -= 1  # the last window must start inside the image or its left padding
        return count

    def needs(self, start: int, stop: int) -> tuple[int, int]:
        """The input interval that output [start, stop) reads; may lie outside the image."""
        if stop <= start:
            return 0, 0
        first = start * self.stride - self.padding
        return first, (stop - 1) * self.stride - self.padding + self.reach

    def transposed_size(self, size: int, extra: int = 0) -> int:
        """Output pixels of the transposed operation; `extra` is PyTorch's output padding."""
        return (size - 1) * self.stride - 2 * self.padding + self.reach + extra

    def transposed_needs(self, start: int, stop: int, size: int) -> tuple[int, int]:
        """The input interval, of `size` pixels, that output [start, stop) of the transposed reads.

        That is: the outputs of the operation itself that read pixels of [start, stop).
        """
        first = max(0, -(-(start + self.padding - self.reach + 1) // self.stride))
        last = min(size, (stop - 1 + self.padding) // self.stride + 1)
        return (first, last) if start < stop and first < last else (0, 0)


@lru_cache(maxsize=4096)
def needed_boxes(output: Layout, rows: Window, cols: Window) -> tuple[Box, ...]:
    """The input box that each part of `output` needs; empty where it has no output."""
    return tuple(
        EMPTY_BOX
        if box.is_empty
        else Box(
            box.batch0,
            box.batch1,
            *rows.needs(box.row0, box.row1),
            *cols.needs(box.col0, box.col1),
        )
        for box in output.boxes
    )


@lru_cache(maxsize=4096)
def transposed_boxes(layout: Layout, output: Layout, rows: Window, cols: Window) -> tuple[Box, ...]:
    """The box of an image on `layout` that each part of `output`, its transposed, needs.

    Empty where a part has no output, or none of its outputs reads a pixel.
    """
    _, height, width = layout.size
    boxes = []
    for box in output.boxes:
        row0, row1 = rows.transposed_needs(box.row0, box.row1, height)
        col0, col1 = cols.transposed_needs(box.col0, box.col1, width)
        need = Box(box.batch0, box.batch1, row0, row1, col0, col1)
        boxes.append(EMPTY_BOX if need.is_empty else need)
    return tuple(boxes)
