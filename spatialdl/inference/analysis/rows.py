"""Rows of features divided over ranks: arrays in memory, or files read in blocks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.comm.world import as_communicator
from spatialdl.data.feature_file import FeatureFile
from spatialdl.inference.predicting.agreed_errors import agreeing

Comm = Any  # communicator of mpi4py or of this package, or None; Any avoids importing MPI

_READ, _LONGEST = 2**21, 2**15  # numbers (16 MB in float64) and rows per read
_IN_CACHE = 2**17  # numbers per block on a CPU, to stay in cache over several uses
KEPT = 2**31
"""Bytes of feature files that a rank keeps in memory between passes."""


class Rows(ABC):
    """This rank's rows.

    Attributes:
        count: number of rows.
        width: number of columns; 0 for an empty array without columns.
        dtype: stored dtype.
    """

    count: int
    width: int
    dtype: torch.dtype

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Read rows start to stop in the stored dtype, on the CPU."""

    @abstractmethod
    def place(self, row: int) -> str:
        """Name of a row, for messages."""

    def spans(self) -> Iterator[tuple[int, int]]:
        """Start and stop of each read."""
        step = min(max(1, _READ // max(1, self.width)), _LONGEST)
        for start in range(0, self.count, step):
            yield start, min(start + step, self.count)

    def blocks(self, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """All rows in float64, block by block, each with its slice.

        Raises:
            ValueError: NaN or infinity, or a damaged file.
        """
        step = _LONGEST if device.type != "cpu" else max(16, _IN_CACHE // max(1, self.width))
        for start, stop in self.spans():
            at = start
            for some in torch.split(self.read(start, stop), step):
                yield slice(at, at + len(some)), self.checked(some, at, device)
                at += len(some)

    def checked(self, rows: Tensor, start: int, device: torch.device) -> Tensor:
        """Rows that were read from `start`, in float64.

        Raises:
            ValueError: NaN or infinity.
        """
        block = rows.to(device, torch.float64)
        if not torch.isfinite(block.sum()):  # a sum is faster than a test of every value
            bad = (~torch.isfinite(block)).nonzero()
            if len(bad):
                row, column = bad[0].tolist()
                raise ValueError(
                    f"{self.place(start + row)}, column {column}, is {float(block[row, column])}: "
                    "features must be finite"
                )
        return block


class ArrayRows(Rows):
    """Rows of a tensor in memory.

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
    """Rows of feature files, read on demand.

    Args:
        parts: parts of files, in the order of the rows.
        width: number of columns.
        keep: bytes to cache in memory between passes.
        progress: called with the number of rows of each read.
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
        rows = torch.cat(pieces)
        if rows.nbytes <= self._free:
            self._free -= rows.nbytes
            self._kept[start, stop] = rows
        return rows

    def place(self, row: int) -> str:
        part, first = self._parts[self._at(row)], self._ends[self._at(row)]
        return f"{part.file.path}: row {part.start + row - first}"


def share(files: Sequence[FeatureFile], rank: int, size: int) -> list[FilePart]:
    """The rows of one of `size` ranks: equal contiguous shares, in the order of the files."""
    ends = list(accumulate((file.tiles for file in files), initial=0))
    first, last = ends[-1] * rank // size, ends[-1] * (rank + 1) // size
    parts = []
    for file, start in zip(files, ends[:-1], strict=True):
        inside = max(first - start, 0), min(last - start, file.tiles)
        if inside[0] < inside[1]:
            parts.append(FilePart(file, inside[0], inside[1]))
    return parts


def as_rows(values: Any) -> Rows:
    """Wrap a tensor or array-like of any real dtype as rows.

    Raises:
        ValueError: not two-dimensional, or not real.
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
    """Rows divided over ranks; construction is collective.

    Args:
        values: this rank's rows, see `as_rows`; may be empty.
        comm: communicator of mpi4py or of this package; None: single process.
        device: device of the computation.
        least: minimum number of rows on all ranks together.

    Attributes:
        comm: the communicator.
        rows: rows of this rank.
        counts: number of rows of each rank.
        total: number of rows of all ranks.
        first: index of this rank's first row among the rows of all ranks.
        width: number of columns.
        dtype: common dtype of the rows of all ranks.

    Raises:
        ValueError: on all ranks: invalid rows on a rank, different widths, or too few rows.
    """

    def __init__(self, values: Any, comm: Comm, device: str | torch.device, least: int = 1) -> None:
        self.comm: Communicator = SingleProcess() if comm is None else as_communicator(comm)
        self.device = torch.device(device)
        with agreeing(self.comm):
            self.rows = as_rows(values)
        own = self.rows.count, self.rows.width, self.rows.dtype
        everywhere = self.comm.allgather(own)
        self.counts = [count for count, _, _ in everywhere]
        self.total = sum(self.counts)
        self.first = sum(self.counts[: self.comm.rank])
        widths = {width: rank for rank, (count, width, _) in enumerate(everywhere) if count}
        if len(widths) > 1:
            listed = ", ".join(f"{width} on rank {rank}" for width, rank in widths.items())
            raise ValueError(f"rows have different widths: {listed}")
        if self.total < least:
            raise ValueError(f"there are {self.total} rows on all ranks, expected at least {least}")
        self.width = next(iter(widths), 0)
        if self.width < 1:
            raise ValueError("rows have no columns")
        self.dtype = _common([dtype for count, _, dtype in everywhere if count])

    def sums(
        self,
        shapes: Sequence[tuple[int, ...]],
        add: Callable[[list[Tensor], slice, Tensor], object],
    ) -> list[Tensor]:
        """Sums over the rows of all ranks.

        Args:
            shapes: shapes of the sums.
            add: adds the part of a block to float64 tensors of these shapes; called with the sums,
                the slice of the block among this rank's rows, and the block.
        """

        def work(sums: list[Tensor]) -> None:
            for place, block in self.rows.blocks(self.device):
                add(sums, place, block)

        return total(self.comm, shapes, work, self.device)

    def generator(self, seed: int | None) -> np.random.RandomState:
        """Generator with the same state on all ranks, from rank 0's seed, or a random one."""
        fresh = int(np.random.RandomState().randint(2**31 - 1)) if seed is None else seed
        return np.random.RandomState(self.comm.bcast(fresh))

    @cached_property
    def mean(self) -> Tensor:
        """Mean of each column, (width,); the first use is collective."""
        [sums] = self.sums([(self.width,)], lambda sums, _, block: sums[0].add_(block.sum(0)))
        return sums.div(self.total)

    def fetch(self, local: Sequence[int | None]) -> Tensor:
        """Broadcast rows of all ranks, (len, width), in float64; collective.

        Args:
            local: this rank's indices of the rows it owns, None for rows of other ranks.
        """

        def work(sums: list[Tensor]) -> None:
            for number, index in enumerate(local):
                if index is not None:
                    row = self.rows.read(index, index + 1)
                    sums[0][number] = self.rows.checked(row, index, self.device)[0]

        [rows] = total(self.comm, [(len(local), self.width)], work, self.device)
        return rows


def total(
    comm: Communicator,
    shapes: Sequence[tuple[int, ...]],
    work: Callable[[list[Tensor]], object],
    device: torch.device,
) -> list[Tensor]:
    """Sum over ranks by one all-reduce; bitwise the same on every rank.

    Args:
        shapes: shapes of the sums.
        work: adds this rank's part to float64 zeros of these shapes; must not communicate, and its
            errors are raised on all ranks.
        device: device of the sums.
    """
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    parts = torch.split(flat, sizes)
    sums = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    with agreeing(comm):
        work(sums)
    if comm.size > 1:
        host = flat.cpu()
        comm.all_reduce_(host)
        flat.copy_(host)
    return sums
