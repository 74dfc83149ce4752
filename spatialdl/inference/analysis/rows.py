"""Rows of features divided over ranks: arrays in memory, or files read in blocks; estimators."""

from __future__ import annotations

import inspect
import json
import math
import zipfile
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.comm.world import as_communicator
from spatialdl.common.files import replacing
from spatialdl.data.feature_file import FeatureFile
from spatialdl.inference.predicting.loop import agreeing

Comm = Any  # communicator of mpi4py or of this package, or None; Any avoids importing MPI

_READ, _LONGEST = 2**21, 2**15  # numbers (16 MB in float64) and rows per read
_IN_CACHE = 2**17  # numbers per block on a CPU, to stay in cache over several uses
Array = npt.NDArray[Any]
_OF_OWN_ROWS = ("labels_", "folds_")
_DAMAGED = (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError)
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

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows in float64, block by block, each with its slice.

        Raises:
            ValueError: NaN or infinity, or a damaged file.
        """
        step = max(16, _IN_CACHE // max(1, self.width))
        for start, stop in self.spans():
            at = start
            for some in torch.split(self.read(start, stop), step):
                yield slice(at, at + len(some)), self.checked(some, at)
                at += len(some)

    def checked(self, rows: Tensor, start: int) -> Tensor:
        """Rows that were read from `start`, in float64.

        Raises:
            ValueError: NaN or infinity.
        """
        block = rows.double()
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

    def __init__(self, values: Any, comm: Comm, least: int = 1) -> None:
        self.comm: Communicator = SingleProcess() if comm is None else as_communicator(comm)
        with agreeing(self.comm):
            self.rows = as_rows(values)
        everywhere = self.comm.allgather((self.rows.count, self.rows.width, self.rows.dtype))
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
            for place, block in self.rows.blocks():
                add(sums, place, block)

        return total(self.comm, shapes, work)

    @cached_property
    def mean(self) -> Tensor:
        """Mean of each column, (width,); the first use is collective."""
        [sums] = self.sums([(self.width,)], lambda sums, _, block: sums[0].add_(block.sum(0)))
        return sums.div(self.total)

    @cached_property
    def variation(self) -> Tensor:
        """Sum of the squares of each column minus its mean, (width,); first use collective."""
        mean = self.mean
        [squares] = self.sums(
            [(self.width,)], lambda sums, _, block: sums[0].add_((block - mean).square().sum(0))
        )
        return squares

    def fetch(self, local: Sequence[int | None]) -> Tensor:
        """Broadcast rows of all ranks, (len, width), in float64; collective.

        Args:
            local: this rank's indices of the rows it owns, None for rows of other ranks.
        """

        def work(sums: list[Tensor]) -> None:
            for number, index in enumerate(local):
                if index is not None:
                    row = self.rows.read(index, index + 1)
                    sums[0][number] = self.rows.checked(row, index)[0]

        [rows] = total(self.comm, [(len(local), self.width)], work)
        return rows


def total(
    comm: Communicator,
    shapes: Sequence[tuple[int, ...]],
    work: Callable[[list[Tensor]], object],
) -> list[Tensor]:
    """Sum over ranks by one all-reduce; bitwise the same on every rank.

    Args:
        shapes: shapes of the sums.
        work: adds this rank's part to float64 zeros of these shapes; must not communicate, and its
            errors are raised on all ranks.
    """
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.zeros(sum(sizes), dtype=torch.float64)
    parts = torch.split(flat, sizes)
    sums = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    with agreeing(comm):
        work(sums)
    comm.all_reduce_(flat)
    return sums


# --- estimators


class Estimator:
    """Estimator with scikit-learn's interface; constructor arguments are its parameters."""

    comm: Comm
    n_features_in_: int

    def get_params(self) -> dict[str, Any]:
        """Parameters by name."""
        names = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in names}

    def _fitted_rows(self, values: Any) -> Rows:
        """Rows to apply the model to.

        Raises:
            ValueError: the model is not fitted, or the rows have another width.
        """
        if not hasattr(self, "n_features_in_"):
            raise ValueError(f"{type(self).__name__} is not fitted: call fit first")
        rows = as_rows(values)
        if rows.count and rows.width != self.n_features_in_:
            raise ValueError(
                f"rows have {rows.width} columns, the model was fitted on {self.n_features_in_}"
            )
        return rows

    def _applied(self, values: Any, function: Callable[[Tensor], Tensor]) -> Array:
        """The results (rows, ...) of a function of blocks of rows; without communication."""
        rows = self._fitted_rows(values)
        none = torch.empty(0, self.n_features_in_, dtype=torch.float64)
        blocks = [none, *(block for _, block in rows.blocks())]
        return np.concatenate([function(block).numpy() for block in blocks])


def positive(name: str, value: object) -> int:
    """Check that a value is a whole number of at least 1.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    return int(value)


def save_model(path: Path, model: Estimator) -> None:
    """Write a fitted model atomically, without attributes of single rows.

    Raises:
        OSError: the file cannot be written.
    """
    params = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in model.get_params().items()
        if name != "comm"
    }
    fitted = {
        name: np.asarray(value)
        for name, value in vars(model).items()
        if name.endswith("_") and not name.startswith("_") and name not in _OF_OWN_ROWS
    }
    about = {"estimator": type(model).__name__, "parameters": params}
    with replacing(path) as file:
        np.savez(file, about=np.array(json.dumps(about)), **fitted)  # type: ignore[arg-type]


def load_model(path: Path, kinds: tuple[type[Estimator], ...], method: str) -> Any:
    """Load a model of `save_model`.

    Args:
        path: file name.
        kinds: classes that the method can apply.
        method: name of the method, for messages.

    Raises:
        ValueError: the file is missing, damaged, or not a model of these kinds.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a model: expected a file model.npz")
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            kind = next((one for one in kinds if one.__name__ == about["estimator"]), None)
            if kind is None:
                raise ValueError(f"it is a {about['estimator']}, which {method} cannot apply")
            given = about["parameters"]
            if given.get("whiten"):
                raise ValueError("it whitens, which is no longer supported: fit it again")
            names = inspect.signature(kind).parameters
            known = {name: value for name, value in given.items() if name in names}
            model = kind(**known)
            for name in set(file.files) - {"about"}:
                value = file[name]
                setattr(model, name, value if value.ndim else value.item())
    except _DAMAGED as error:
        raise ValueError(f"{path} has no valid model: {error}") from error
    return model
