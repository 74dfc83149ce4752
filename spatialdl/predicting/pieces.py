"""A map that lies in pieces on the ranks, put together band by band; nobody ever holds it whole."""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.training.validation import Evaluated

Floats = npt.NDArray[np.float64] | npt.NDArray[np.float32]
Part = tuple[tuple[int, ...], Floats]


@dataclass(frozen=True)
class MapPiece:
    """A part of a map: its first slice, row and column, and values (classes, *spatial).

    Attributes:
        file: where the values are, if that is not in memory.
    """

    start: tuple[int, ...]
    values: Tensor
    file: mmap.mmap | None = None

    def let_go(self) -> None:
        """What was read of a file need not stay in memory."""
        if self.file is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.file.madvise(mmap.MADV_DONTNEED)


def kept_in(folder: Path, piece: MapPiece) -> MapPiece:
    """The same in a file without a name, which is read where it is needed."""
    values = piece.values
    with tempfile.TemporaryFile(dir=folder, prefix="spatialdl-map-") as file:
        dtype = values.numpy().dtype
        kept = np.memmap(file, dtype, "w+", shape=tuple(values.shape))
    kept[...] = values.numpy()
    kept.flush()
    stored = MapPiece(piece.start, torch.from_numpy(kept), kept._mmap)  # type: ignore[attr-defined]
    stored.let_go()
    return stored


def own_pieces(local: Tensor, one: Evaluated) -> list[MapPiece]:
    """What this rank holds of the map of one image, that no other holds before it.

    Args:
        local: (1, classes, *spatial), its values.
        one: where they lie.
    """
    start = (0,) * (local.dim() - 2)
    if isinstance(one.output, SpatialTensor):
        if not one.has_tile:
            return []
        start = tuple(first for first, _ in one.mesh.own_box(one.output.spatial_layout).spatial)
    elif not one.counts:
        return []
    return [MapPiece(start, local[0].cpu())] if local.numel() else []


def joined(pieces: Sequence[MapPiece]) -> list[MapPiece]:
    """The same as one piece, of pieces that make up a box."""
    if len(pieces) < 2:
        return list(pieces)
    starts = [one.start for one in pieces]
    ends = [tuple(map(sum, zip(one.start, one.values.shape[1:], strict=True))) for one in pieces]
    first, last = (
        tuple(map(f, zip(*some, strict=True))) for f, some in ((min, starts), (max, ends))
    )
    extents = [end - start for start, end in zip(first, last, strict=True)]
    values = pieces[0].values.new_empty((len(pieces[0].values), *extents))
    for one, start in zip(pieces, starts, strict=True):
        each = zip(start, first, one.values.shape[1:], strict=True)
        values[(slice(None), *(slice(a - b, a - b + n) for a, b, n in each))] = one.values
    return [MapPiece(first, values)]


class PiecedMap:
    """The map of a region; all ranks make it and go through its bands together.

    Attributes:
        size: of its spatial dims; bands lie along the first.

    Args:
        pieces: of this rank.
        offset: where the region begins in the map.
        empty: the value where there is none.
    """

    def __init__(
        self,
        world: Communicator,
        size: tuple[int, ...],
        pieces: Sequence[MapPiece],
        region: tuple[int, ...],
        offset: tuple[int, ...] | None = None,
        empty: float = math.nan,
    ) -> None:
        self._world, self.size, self._pieces = world, size, pieces
        self._region, self._offset = region, offset or (0,) * len(size)
        self._empty = empty

    def bands(self, column: int, rows: int) -> Iterator[Floats]:
        """The map of a class, some rows (slices) at a time, from first to last, on rank 0.

        Others go through it as well, and get bands without a column.
        """
        yield from self._bands(column, rows, (), np.float64)

    def blocks(self, columns: int, rows: int, dtype: npt.DTypeLike) -> Iterator[npt.NDArray[Any]]:
        """As `bands`, of all columns: (columns, rows, ...), of a type."""
        yield from self._bands(slice(None), rows, (columns,), dtype)

    def _bands(
        self, column: int | slice, rows: int, before: tuple[int, ...], dtype: npt.DTypeLike
    ) -> Iterator[npt.NDArray[Any]]:
        """Bands whose dims are those before the map's, and the map's."""
        top, *inset = self._offset
        for first in range(0, self.size[0], rows):
            last = min(first + rows, self.size[0])
            everybody: list[list[Part]] | None = [] if self._world.rank == 0 else None
            if first < top + self._region[0] and top < last:  # the same on all ranks
                parts = (_cut(piece, column, first - top, last - top) for piece in self._pieces)
                everybody = self._world.gather([part for one in parts for part in one])
            if everybody is None:
                yield np.empty((*before, last - first, *(0 for _ in inset)), dtype)
                continue
            band = np.full((*before, last - first, *self.size[1:]), self._empty, dtype)
            for start, values in (part for one in everybody for part in one):
                at = (start[0] + top - first, *map(sum, zip(start[1:], inset, strict=True)))
                extents = values.shape[len(before) :]
                ends = map(sum, zip(at, extents, strict=True))
                place: tuple[Any, ...] = (..., *map(slice, at, ends))
                under = band[place]
                place = (..., *map(slice, under.shape[len(before) :]))
                under[...] = values[place]  # cut at the map's end
            for piece in self._pieces:
                piece.let_go()
            yield band


def _cut(piece: MapPiece, column: int | slice, first: int, last: int) -> Iterator[Part]:
    """Those rows of a piece that lie in a band of the region."""
    row = piece.start[0]
    begin, end = max(first, row), min(last, row + piece.values.shape[1])
    if begin < end:
        part = piece.values[:, begin - row : end - row][column]
        yield (begin, *piece.start[1:]), np.ascontiguousarray(part.numpy())
