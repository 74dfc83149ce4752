"""The three principal components of a map distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.predicting.pieces import MapPiece

COUNT = 3
_ROWS = 2**16  # cells converted to float64 at a time


class Components(NamedTuple):
    """Principal components over all cells.

    Attributes:
        mean: float64 (width,).
        directions: float64 (found, width), unit vectors, at most `COUNT`; the largest entry of each
            is positive, so that they are the same for any number of ranks.
        parts: (found,), share of variance of each.
    """

    mean: Tensor
    directions: Tensor
    parts: Tensor

    def of(self, piece: MapPiece) -> MapPiece:
        """Project a piece of the map on the components, float32 (found, rows, columns)."""
        rows, columns = piece.values.shape[1:]
        projected = [(cells - self.mean) @ self.directions.T for cells in _cells(piece)]
        values = torch.cat(projected).T.float().reshape(len(self.directions), rows, columns)
        return MapPiece(piece.start, values.contiguous())


def components_of(pieces: Sequence[MapPiece], width: int, world: Communicator) -> Components:
    """Compute the components of a map; collective over `world`.

    Args:
        pieces: pieces of this rank.
        width: features per cell.
    """
    sums = torch.zeros(width + 1, dtype=torch.float64)
    for cells in _all_cells(pieces):
        sums[:-1] += cells.sum(0)
        sums[-1] += len(cells)
    sums = world.all_reduce(sums)
    mean = sums[:-1] / sums[-1]
    products = torch.zeros(width, width, dtype=torch.float64)
    for cells in _all_cells(pieces):  # a second pass, which avoids cancellation
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
    """Iterate over cells of a piece, float64 (cells, width), in row-major order."""
    for some in torch.split(piece.values.flatten(1), _ROWS, 1):
        yield some.T.double()
