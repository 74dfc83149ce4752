"""The three principal components of a map that lies in pieces on the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.predicting.pieces import MapPiece

COUNT = 3
_ROWS = 2**16  # cells that are taken to float64 at a time


class Components(NamedTuple):
    """Directions of most variance around the mean, over all cells.

    Attributes:
        mean: float64 (width,).
        directions: float64 (found, width), of unit length, at most `COUNT`; the largest entry of
            each is above 0, so that they are the same for any number of ranks.
        parts: of the variance, (found,).
    """

    mean: Tensor
    directions: Tensor
    parts: Tensor

    def of(self, piece: MapPiece) -> MapPiece:
        """A piece of the map as its components, float32 (found, rows, columns)."""
        rows, columns = piece.values.shape[1:]
        found = [(cells - self.mean) @ self.directions.T for cells in _cells(piece)]
        values = torch.cat(found).T.float().reshape(len(self.directions), rows, columns)
        return MapPiece(piece.start, values.contiguous())


def components_of(pieces: Sequence[MapPiece], width: int, world: Communicator) -> Components:
    """The components of the map; all ranks must call it with their own pieces.

    Args:
        width: features of a cell.
    """
    sums = torch.zeros(width + 1, dtype=torch.float64)
    for cells in _all_cells(pieces):
        sums[:-1] += cells.sum(0)
        sums[-1] += len(cells)
    sums = world.all_reduce(sums)
    mean = sums[:-1] / sums[-1]
    products = torch.zeros(width, width, dtype=torch.float64)
    for cells in _all_cells(pieces):  # around the mean, which loses no digits
        centred = cells - mean
        products += centred.T @ centred
    products = world.all_reduce(products)
    variances, vectors = torch.linalg.eigh(products)
    order = variances.argsort(descending=True)[:COUNT]
    directions = vectors[:, order].T
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    whole = variances.clamp(min=0).sum().clamp(min=torch.finfo(torch.float64).tiny)
    parts = variances[order].clamp(min=0) / whole
    return Components(mean, directions * largest.sign(), parts)


def _all_cells(pieces: Sequence[MapPiece]) -> Iterator[Tensor]:
    for piece in pieces:
        yield from _cells(piece)


def _cells(piece: MapPiece) -> Iterator[Tensor]:
    """Cells of a piece, float64 (cells, width), row after row."""
    for some in torch.split(piece.values.flatten(1), _ROWS, 1):
        yield some.T.double()
