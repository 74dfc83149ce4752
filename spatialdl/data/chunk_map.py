"""Where the chunks of a dataset lie in their file, so that pixels are copied straight from there.

A raw chunk is its pixels, one after the other, at one place of the file: reading a box needs
nothing of HDF5 but these places. They are asked for once a dataset (5 microseconds a chunk; asking
for single chunks by their coordinates takes HDF5 a walk over all of them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

Where = tuple[int | slice, ...]
"""The number of the image in a stack, then rows and columns as slices with start and stop."""
MISSING = -1


Part = tuple[int, tuple[slice, slice], tuple[slice, slice]]
"""What a box has of a chunk: where in the file the chunk begins (`MISSING` if it was never
written), its rows and columns in the chunk, and in the box."""


@dataclass(frozen=True)
class ChunkMap:
    """The places of all chunks of a dataset of raw bytes.

    Attributes:
        shape: of the dataset, [N,] rows, cols[, channels].
        cell: (rows, cols[, channels]) of a chunk.
        offsets: byte of the file at which each chunk begins, `MISSING` where there is none;
            ([N,] chunks down, chunks across).
    """

    shape: tuple[int, ...]
    cell: tuple[int, ...]
    offsets: npt.NDArray[np.int64]

    def parts(self, where: Where, out_shape: tuple[int, ...]) -> Iterator[Part]:
        """The chunks under a box that is not empty.

        Raises:
            ValueError: the dataset has no such box, or `out_shape` is not the box's.
        """
        *before, rows, cols = where
        assert isinstance(rows, slice)
        assert isinstance(cols, slice)
        self._check([*before, rows, cols], out_shape)
        grid = self.offsets[tuple(before)] if before else self.offsets
        down, across = _spans(rows, self.cell[0]), _spans(cols, self.cell[1])
        for row, inside_rows, out_rows in down:
            for col, inside_cols, out_cols in across:
                offset = grid.item(row, col)
                yield offset, (inside_rows, inside_cols), (out_rows, out_cols)

    def _check(self, where: list[Any], out_shape: tuple[int, ...]) -> None:
        *before, rows, cols = where
        channels = self.shape[self.offsets.ndim :]
        fits = (
            len(where) == self.offsets.ndim
            and all(0 <= at < n for at, n in zip(before, self.shape, strict=False))
            and 0 <= rows.start < rows.stop <= self.shape[len(before)]
            and 0 <= cols.start < cols.stop <= self.shape[len(before) + 1]
            and out_shape == (rows.stop - rows.start, cols.stop - cols.start, *channels)
        )
        if not fits:
            raise ValueError(f"its shape is {self.shape}, where {where} is wanted in {out_shape}")


def _spans(cut: slice, step: int) -> list[tuple[int, slice, slice]]:
    """The chunks under a cut along one dim: number, what of the chunk, and where in the cut."""
    spans = []
    for number in range(cut.start // step, (cut.stop - 1) // step + 1):
        at = number * step
        begin, end = max(at, cut.start), min(at + step, cut.stop)
        inside = slice(begin - at, end - at)
        spans.append((number, inside, slice(begin - cut.start, end - cut.start)))
    return spans


def map_chunks(dataset: h5py.Dataset, stacked: bool, file_size: int) -> ChunkMap | None:
    """Find the chunks of an image or a mask, or of a stack of them.

    Args:
        dataset: the one to be mapped.
        stacked: its first dim counts images.
        file_size: bytes of its file.

    Returns:
        None where HDF5 has to read it: it is not cut into chunks along rows and columns alone,
        is not of bytes, or has filters.

    Raises:
        ValueError: a chunk lies outside the file or has another size than its pixels.
    """
    if not _is_raw(dataset, stacked):
        return None
    dims = 3 if stacked else 2
    shape, chunk = dataset.shape, dataset.chunks
    counts = [-(-n // each) for n, each in zip(shape[:dims], chunk[:dims], strict=True)]
    offsets = np.full(counts, MISSING, np.int64)
    size, wrong = prod(chunk), []

    def note(info: Any) -> None:
        if info.size != size or info.filter_mask or not 0 <= info.byte_offset <= file_size - size:
            wrong.append(info)
        else:
            place = zip(info.chunk_offset[:dims], chunk[:dims], strict=True)
            offsets[tuple([at // each for at, each in place])] = info.byte_offset

    dataset.id.chunk_iter(note)
    if wrong:
        place, _, begin, has = wrong[0]
        raise ValueError(
            f"chunk at {place} has {has} bytes at {begin}, expected {size} within {file_size}"
        )
    return ChunkMap(shape, chunk[1:] if stacked else chunk, offsets)


def _is_raw(dataset: h5py.Dataset, stacked: bool) -> bool:
    shape, chunk = dataset.shape, dataset.chunks
    if dataset.dtype != np.uint8 or chunk is None or not hasattr(dataset.id, "chunk_iter"):
        return False
    if dataset.id.get_create_plist().get_nfilters():
        return False
    dims = len(shape) - stacked
    if dims not in (2, 3) or (stacked and chunk[0] != 1):
        return False
    return dims == 2 or bool(chunk[-1] == shape[-1])
