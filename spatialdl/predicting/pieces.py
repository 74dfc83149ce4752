"""A map that lies in pieces on the ranks, put together band by band; nobody ever holds it whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.training.validation import Evaluated

Floats = npt.NDArray[np.float64] | npt.NDArray[np.float32]
Part = tuple[int, int, Floats]


@dataclass(frozen=True)
class Piece:
    """A part of a map: its first row and column, and values (classes, rows, columns)."""

    row: int
    col: int
    values: Tensor


def own_pieces(local: Tensor, one: Evaluated) -> list[Piece]:
    """What this rank holds of the map of one image, that no other holds before it.

    Args:
        local: (1, classes, rows, columns), its values.
        one: where they lie.
    """
    row = col = 0
    if isinstance(one.output, SpatialTensor):
        _, (row, _), (col, _) = one.mesh.own_box(one.output.spatial_layout)
    elif not one.counts:
        return []
    return [Piece(row, col, local[0].cpu())] if local.numel() else []


class PiecedMap:
    """The map of a region; all ranks make it and go through its bands together.

    Attributes:
        size: rows and columns.

    Args:
        pieces: of this rank.
        offset: row and column of the map where the region begins.
    """

    def __init__(
        self,
        world: Communicator,
        size: tuple[int, int],
        pieces: Sequence[Piece],
        region: tuple[int, int],
        offset: tuple[int, int] = (0, 0),
    ) -> None:
        self._world, self.size, self._pieces = world, size, pieces
        self._region, self._offset = region, offset

    def bands(self, column: int, rows: int) -> Iterator[Floats]:
        """The map of a class, some rows at a time, from top to bottom, on rank 0.

        Others go through it as well, and get bands without a column. Where there is no value, it
        is NaN.
        """
        top, left = self._offset
        for first in range(0, self.size[0], rows):
            last = min(first + rows, self.size[0])
            everybody: list[list[Part]] | None = [] if self._world.rank == 0 else None
            if first < top + self._region[0] and top < last:  # the same on all ranks
                parts = (_cut(piece, column, first - top, last - top) for piece in self._pieces)
                everybody = self._world.gather([part for one in parts for part in one])
            if everybody is None:
                yield np.empty((last - first, 0))
                continue
            band = np.full((last - first, self.size[1]), np.nan)
            for row, col, values in (part for one in everybody for part in one):
                at_row, at_col = row + top - first, col + left
                width = min(values.shape[1], self.size[1] - at_col)
                band[at_row : at_row + len(values), at_col : at_col + width] = values[:, :width]
            yield band


def _cut(piece: Piece, column: int, first: int, last: int) -> Iterator[Part]:
    """Those rows of a piece that lie in a band of the region."""
    row0, row1 = max(first, piece.row), min(last, piece.row + piece.values.shape[1])
    if row0 < row1:
        part = piece.values[column, row0 - piece.row : row1 - piece.row]
        yield row0, piece.col, np.ascontiguousarray(part.numpy())
