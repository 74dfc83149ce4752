"""Maps in pieces on the ranks, assembled band by band, and their confusion counts.

No rank holds a full map.
"""

from __future__ import annotations

import logging
import math
import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.data.format import UNLABELLED
from spatialdl.data.image_source import Box, Pixels
from spatialdl.inference.predicting.agreed_errors import agreeing
from spatialdl.inference.predicting.inputs import Input
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.training.validation import Evaluated

log = logging.getLogger("spatialdl.predict")

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64] | npt.NDArray[np.float32]
Part = tuple[tuple[int, ...], Floats]


@dataclass(frozen=True)
class MapPiece:
    """A piece of a map: its first slice, row and column, and values (classes, *spatial).

    Attributes:
        file: memory map that backs the values; None if they are in memory.
    """

    start: tuple[int, ...]
    values: Tensor
    file: mmap.mmap | None = None

    @property
    def box(self) -> Box:
        """First and last (exclusive) slice, row and column."""
        extents = zip(self.start, self.values.shape[1:], strict=True)
        return tuple(number for first, n in extents for number in (first, first + n))

    def release(self) -> None:
        """Advise the kernel to drop the file's pages from memory."""
        if self.file is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.file.madvise(mmap.MADV_DONTNEED)


def to_file(folder: Path, piece: MapPiece) -> MapPiece:
    """Move a piece to an anonymous, memory-mapped file."""
    values = piece.values
    with tempfile.TemporaryFile(dir=folder, prefix="spatialdl-map-") as file:
        file.truncate(values.nbytes)
        mapped = mmap.mmap(file.fileno(), values.nbytes)
    again = torch.frombuffer(mapped, dtype=values.dtype).view(values.shape).copy_(values)
    mapped.flush()
    stored = MapPiece(piece.start, again, mapped)
    stored.release()
    return stored


def own_pieces(local: Tensor, one: Evaluated) -> list[MapPiece]:
    """This rank's pieces of the map of one image; replicas are counted once.

    Args:
        local: (1, classes, *spatial), values on this rank.
        one: the evaluated micro-batch, which has their layout.
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
    """Merge pieces that tile a box into one piece."""
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
    """A map distributed over ranks; construction and iteration are collective.

    Attributes:
        size: of the spatial dims; bands are along the first.

    Args:
        pieces: pieces of this rank.
        region: size of the region that pieces cover.
        offset: origin of the region in the map.
        empty: value outside the region.
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
        """Iterate over the map of a class, `rows` rows (slices) at a time, on rank 0.

        The other ranks must iterate as well, and get empty bands.
        """
        yield from self._bands(column, rows, (), np.float64)

    def blocks(self, columns: int, rows: int, dtype: npt.DTypeLike) -> Iterator[npt.NDArray[Any]]:
        """Iterate as `bands`, with all columns: (columns, rows, ...), in `dtype`."""
        yield from self._bands(slice(None), rows, (columns,), dtype)

    def _bands(
        self, column: int | slice, rows: int, leading: tuple[int, ...], dtype: npt.DTypeLike
    ) -> Iterator[npt.NDArray[Any]]:
        """Iterate over bands of shape (*leading, rows, ...)."""
        top, *inset = self._offset
        for first in range(0, self.size[0], rows):
            last = min(first + rows, self.size[0])
            gathered: list[list[Part]] | None = [] if self._world.rank == 0 else None
            if first < top + self._region[0] and top < last:  # the same on all ranks
                parts = (_cut(piece, column, first - top, last - top) for piece in self._pieces)
                gathered = self._world.gather([part for one in parts for part in one])
            if gathered is None:
                yield np.empty((*leading, last - first, *(0 for _ in inset)), dtype)
                continue
            band = np.full((*leading, last - first, *self.size[1:]), self._empty, dtype)
            for start, values in (part for one in gathered for part in one):
                at = (start[0] + top - first, *map(sum, zip(start[1:], inset, strict=True)))
                extents = values.shape[len(leading) :]
                ends = map(sum, zip(at, extents, strict=True))
                place: tuple[Any, ...] = (..., *map(slice, at, ends))
                under = band[place]
                place = (..., *map(slice, under.shape[len(leading) :]))
                under[...] = values[place]  # clipped at the map's end
            for piece in self._pieces:
                piece.release()
            yield band


def _cut(piece: MapPiece, column: int | slice, first: int, last: int) -> Iterator[Part]:
    """The rows of a piece within a band of the region."""
    row = piece.start[0]
    begin, end = max(first, row), min(last, row + piece.values.shape[1])
    if begin < end:
        part = piece.values[:, begin - row : end - row][column]
        yield (begin, *piece.start[1:]), np.ascontiguousarray(part.numpy())


# --- confusion counts


def confusion_of(
    world: Communicator, given: Input, pieces: Sequence[MapPiece], classes: int
) -> Counts | None:
    """Count pixels, int64 (classes, classes), by true and predicted class.

    Collective; all ranks get the sum. Unlabelled pixels are ignored. A mask that is unreadable or
    has an unknown class is logged.

    Args:
        pieces: this rank's pieces of the probability map.

    Returns:
        The counts; None without a valid mask.
    """
    if given.read_mask is None:
        return None
    own = np.zeros((classes, classes), np.int64)
    try:
        with agreeing(world):
            for piece in pieces:
                own += _counted(given.read_mask, piece, classes)
    except ValueError as error:  # the same on all ranks
        if world.rank == 0:
            log.warning("%s: no confusion counts from its mask: %s", given.name, error)
        return None
    # float64 is exact for counts below 2**53
    total: torch.Tensor = world.all_reduce(torch.from_numpy(own).double())
    return np.asarray(total.numpy().round(), np.int64)


def _counted(read_mask: Callable[[Box], Pixels], piece: MapPiece, classes: int) -> Counts:
    mask = read_mask(piece.box)
    known = mask != UNLABELLED
    truth = mask[known].astype(np.int64)
    if truth.size and int(truth.max()) >= classes:
        raise ValueError(
            f"the mask has a pixel of class {int(truth.max())}, but the network has {classes} "
            "classes"
        )
    predicted = piece.values.argmax(0).numpy()[known]
    cells = np.bincount(truth * classes + predicted, minlength=classes * classes)
    return cells.reshape(classes, classes)
