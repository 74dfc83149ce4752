"""Rows of features divided over ranks: arrays in memory, or files that are read in blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spatialdl.analysis.ranks import Comm, Ranks
from spatialdl.data.feature_file import FeatureFile

_READ, _LONGEST = 2**21, 2**15  # numbers read at once, 16 MB in float64, and rows
_IN_CACHE = 2**17  # numbers of a block on a CPU, which reads it several times
KEPT = 2**31
"""Bytes of feature files that a rank keeps in memory between passes."""


class Rows(ABC):
    """This rank's rows.

    Attributes:
        count: of rows.
        width: numbers of a row; 0 where an empty array has none.
        dtype: in which they are stored.
    """

    count: int
    width: int
    dtype: torch.dtype

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Rows start to stop as they are stored, on the CPU."""

    @abstractmethod
    def place(self, row: int) -> str:
        """A row's name in messages."""

    def spans(self) -> Iterator[tuple[int, int]]:
        """First row and end of what is read at once."""
        step = min(max(1, _READ // max(1, self.width)), _LONGEST)
        for start in range(0, self.count, step):
            yield start, min(start + step, self.count)

    def block(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Rows start to stop in float64.

        Raises:
            ValueError: there is a NaN or infinity, or a file is damaged.
        """
        return self._checked(self.read(start, stop), start, device)

    def blocks(self, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """All rows in float64, a block at a time, each with its place; see `block`."""
        step = _LONGEST if device.type != "cpu" else max(16, _IN_CACHE // max(1, self.width))
        for start, stop in self.spans():
            at = start
            for some in torch.split(self.read(start, stop), step):
                yield slice(at, at + len(some)), self._checked(some, at, device)
                at += len(some)

    def _checked(self, rows: Tensor, start: int, device: torch.device) -> Tensor:
        block = rows.to(device, torch.float64)
        if not torch.isfinite(block.sum()):  # a sum is quicker than looking at all
            bad = (~torch.isfinite(block)).nonzero()
            if len(bad):
                row, column = bad[0].tolist()
                raise ValueError(
                    f"{self.place(start + row)}, column {column}, is {float(block[row, column])}: "
                    "features must be finite"
                )
        return block


class ArrayRows(Rows):
    """Rows of a tensor.

    Args:
        values: (rows, width).
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self.count, self.width = values.shape
        self.dtype = values.dtype

    def read(self, start: int, stop: int) -> Tensor:
        return self._values[start:stop]

    def place(self, row: int) -> str:
        return f"row {row}"


class FilePart(NamedTuple):
    """Rows start to stop of a feature file."""

    file: FeatureFile
    start: int
    stop: int

    @property
    def tiles(self) -> int:
        return self.stop - self.start


class FileRows(Rows):
    """Rows of feature files, read when they are needed.

    Args:
        parts: the rows, in their order.
        width: numbers of a row.
        keep: bytes that stay in memory for the next pass.
        progress: is called with the number of rows that were read.
    """

    def __init__(
        self,
        parts: Sequence[FilePart],
        width: int,
        keep: int = KEPT,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self._parts = [part for part in parts if part.tiles]
        self._ends = list(accumulate((part.tiles for part in self._parts), initial=0))
        self._progress = progress
        self._free, self._kept = keep, dict[tuple[int, int], Tensor]()
        self.count, self.width = self._ends[-1], width
        types = [torch.from_numpy(np.empty(0, part.file.dtype)).dtype for part in self._parts]
        self.dtype = _common(types)

    def _at(self, row: int) -> int:
        return bisect_right(self._ends, row) - 1

    def read(self, start: int, stop: int) -> Tensor:
        if self._progress is not None:
            self._progress(stop - start)
        if (start, stop) in self._kept:
            return self._kept[start, stop]
        pieces, at = [], start
        while at < stop:
            number = self._at(at)
            part, first = self._parts[number], self._ends[number]
            end = min(stop, self._ends[number + 1])
            piece = part.file.read(part.start + at - first, part.start + end - first)
            pieces.append(torch.from_numpy(np.ascontiguousarray(piece)).to(self.dtype))
            at = end
        if not pieces:
            return torch.empty((0, self.width), dtype=self.dtype)
        found = torch.cat(pieces)
        if found.nbytes <= self._free:
            self._free -= found.nbytes
            self._kept[start, stop] = found
        return found

    def place(self, row: int) -> str:
        part, first = self._parts[self._at(row)], self._ends[self._at(row)]
        return f"{part.file.path}: row {part.start + row - first}"


def share(files: Sequence[FeatureFile], rank: int, size: int) -> list[FilePart]:
    """The rows of one of `size` ranks: as many on each, in the order of the files."""
    ends = list(accumulate((file.tiles for file in files), initial=0))
    first, last = ends[-1] * rank // size, ends[-1] * (rank + 1) // size
    found = []
    for file, start in zip(files, ends[:-1], strict=True):
        inside = max(first - start, 0), min(last - start, file.tiles)
        if inside[0] < inside[1]:
            found.append(FilePart(file, inside[0], inside[1]))
    return found


def as_rows(values: Any) -> Rows:
    """This rank's rows of a tensor or what numpy takes for an array, of any real type.

    Raises:
        ValueError: it is not two-dimensional, or has no real numbers.
    """
    if isinstance(values, Rows):
        return values
    if not isinstance(values, Tensor):
        array = np.asarray(values)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"features have type {array.dtype}, expected real numbers")
        if array.dtype.kind in "iub" or array.dtype.itemsize > 8:
            array = array.astype(np.float64)
        values = torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))
    if tuple(values.shape) == (0,):
        values = values.reshape(0, 0)
    if values.ndim != 2 or values.is_complex():
        raise ValueError(
            f"features are {values.dtype} of shape {tuple(values.shape)}, expected real numbers of "
            "shape (rows, width)"
        )
    values = values.detach()
    return ArrayRows(values if values.is_floating_point() else values.double())


def _common(types: Sequence[torch.dtype]) -> torch.dtype:
    common = types[0] if types else torch.float64
    for one in types[1:]:
        common = torch.promote_types(common, one)
    return common


class DividedRows:
    """Rows of all ranks, as one of them sees them; all ranks must make it.

    Args:
        values: this rank's rows, see `as_rows`; there may be none.
        comm: see `Ranks`.
        device: where to compute.
        least: rows that are needed on all ranks together.

    Attributes:
        rows: this rank's own.
        counts: of rows of each rank.
        total: rows of all ranks.
        first: index of this rank's first row among those of all ranks.
        width: numbers of a row.
        dtype: one that holds what any rank has stored.

    Raises:
        ValueError: on all ranks: rows of some rank cannot be used, widths differ, or there are too
            few.
    """

    def __init__(self, values: Any, comm: Comm, device: str | torch.device, least: int = 1) -> None:
        self.ranks = Ranks(comm)
        self.device = torch.device(device)
        self.rows = self.ranks.together(lambda: as_rows(values))
        own = self.rows.count, self.rows.width, self.rows.dtype
        found = self.ranks.comm.allgather(own)
        self.counts = [count for count, _, _ in found]
        self.total = sum(self.counts)
        self.first = sum(self.counts[: self.ranks.rank])
        widths = {width: rank for rank, (count, width, _) in enumerate(found) if count}
        if len(widths) > 1:
            listed = ", ".join(f"{width} on rank {rank}" for width, rank in widths.items())
            raise ValueError(f"rows have different widths: {listed}")
        if self.total < least:
            raise ValueError(f"there are {self.total} rows on all ranks, expected at least {least}")
        self.width = next(iter(widths), 0)
        if self.width < 1:
            raise ValueError("rows have no columns")
        self.dtype = _common([dtype for count, _, dtype in found if count])
        self._mean: Tensor | None = None

    def sums(
        self,
        shapes: Sequence[tuple[int, ...]],
        add: Callable[[list[Tensor], slice, Tensor], object],
    ) -> list[Tensor]:
        """Sums over the rows of all ranks.

        Args:
            add: adds to float64 tensors of these shapes what a block has, given its place among
                this rank's rows and the block.
        """

        def work(sums: list[Tensor]) -> None:
            for place, block in self.rows.blocks(self.device):
                add(sums, place, block)

        return self.ranks.total(shapes, work, self.device)

    def mean(self) -> Tensor:
        """(width,): of each column, kept."""
        if self._mean is None:
            [total] = self.sums([(self.width,)], lambda sums, _, block: sums[0].add_(block.sum(0)))
            self._mean = total / self.total
        return self._mean

    def fetch(self, local: Sequence[int | None]) -> Tensor:
        """(len, width): rows that one rank each names by its own index, on all ranks in float64.

        Args:
            local: indices of this rank's rows, None of those of other ranks.
        """

        def work(sums: list[Tensor]) -> None:
            for number, index in enumerate(local):
                if index is not None:
                    sums[0][number] = self.rows.block(index, index + 1, self.device)[0]

        [found] = self.ranks.total([(len(local), self.width)], work, self.device)
        return found

    def check_width(self, width: int) -> None:
        """Refuse rows of another width than a model was fitted on.

        Raises:
            ValueError: on all ranks.
        """
        if self.width != width:
            raise ValueError(f"rows have {self.width} columns, the model was fitted on {width}")
