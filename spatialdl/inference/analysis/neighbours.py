"""Exact nearest neighbours among rows divided over ranks.

Queries stay on their rank; rows circulate over the ranks, and each query keeps the nearest so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from spatialdl.comm.plan import plan_for
from spatialdl.comm.repartition import move
from spatialdl.inference.analysis.rows import Array, Comm, DividedRows, Estimator, positive
from spatialdl.inference.predicting.loop import agreeing
from spatialdl.layout.layout import Box

METRICS = EUCLIDEAN, COSINE = "euclidean", "cosine"
_QUERIES, _ROWS = 256, 1024  # size of a block of distances
_GATHERED = 2**18  # numbers gathered at once to compute exact distances of candidates
_NOISE = 1e-13  # rounding error of a distance from products, relative to the squared norms

Best = tuple[Tensor, Tensor]
"""Distances (squared if euclidean) and indices, (queries, neighbours), nearest first."""


class NearestNeighbors(Estimator):
    """Exact nearest neighbours among the rows of all ranks.

    Ties are ordered by index, so results are the same on any number of ranks.

    Args:
        n_neighbors: number of neighbours per query.
        metric: `euclidean` or `cosine`.
        comm: communicator of mpi4py or of this package; None: single process.

    Attributes:
        n_samples_fit_: rows of all ranks.
    """

    def __init__(
        self,
        n_neighbors: int = 5,
        *,
        metric: str = EUCLIDEAN,
        comm: Comm = None,
    ) -> None:
        self.n_neighbors, self.metric, self.comm = n_neighbors, metric, comm

    def fit(self, X: Any, y: object = None) -> Self:  # noqa: N803
        """Keep this rank's rows in memory; all ranks must call it.

        Raises:
            ValueError: on all ranks: invalid rows.
        """
        if self.metric not in METRICS:
            raise ValueError(f"metric={self.metric!r} must be one of {', '.join(METRICS)}")
        self._data = data = DividedRows(X, self.comm)
        self._own = own = torch.empty((data.rows.count, data.width), dtype=data.dtype)
        with agreeing(data.comm):
            for start, stop in data.rows.spans():
                own[start:stop] = read = data.rows.read(start, stop)
                data.rows.checked(read, start)
        self.n_features_in_, self.n_samples_fit_ = data.width, data.total
        return self

    def kneighbors(
        self,
        X: Any,  # noqa: N803
        n_neighbors: int | None = None,
    ) -> tuple[Array, Array]:
        """Find the nearest rows of this rank's queries; all ranks must call it.

        Args:
            X: queries (rows, width), possibly empty on a rank.
            n_neighbors: number of neighbours, instead of that of the constructor.

        Returns:
            Distances and indices (queries, neighbours), nearest first. Indices count the rows of
            all ranks, in the order of the ranks.

        Raises:
            ValueError: on all ranks: fewer rows than neighbours, or invalid queries.
        """
        wanted = positive("n_neighbors", self.n_neighbors if n_neighbors is None else n_neighbors)
        if not hasattr(self, "_data"):
            raise ValueError("NearestNeighbors is not fitted: call fit first")
        data = self._data
        if len(set(data.comm.allgather(wanted))) > 1:
            raise ValueError("n_neighbors differs between ranks")
        if wanted > data.total:
            raise ValueError(
                f"n_neighbors={wanted} is more than the {data.total} rows on all ranks"
            )
        with agreeing(data.comm):
            blocks = [block for _, block in self._fitted_rows(X).blocks()]
        queries = [
            self._prepared(some) for block in blocks for some in torch.split(block, _QUERIES)
        ]
        best = [_none(some) for some in queries]
        for first, rows in self._circulate():
            for start in range(0, len(rows), _ROWS):
                block = self._prepared(rows[start : start + _ROWS].double())
                for number, some in enumerate(queries):
                    best[number] = self._better(best[number], some, block, first + start, wanted)
        none = np.empty((0, wanted))
        distances = [found.numpy() for found, _ in best]
        if self.metric == EUCLIDEAN:
            distances = [np.sqrt(found) for found in distances]
        indices = [found.numpy() for _, found in best]
        return np.concatenate([none, *distances]), np.concatenate([none.astype(int), *indices])

    def _circulate(self) -> Iterator[tuple[int, Tensor]]:
        """Rows of each rank in their stored dtype, this rank's first, with their first index."""
        data = self._data
        rank, size, width = data.comm.rank, data.comm.size, data.width
        firsts = list(accumulate(data.counts, initial=0))
        owned = tuple(Box(((0, 1), (a * width, b * width))) for a, b in pairwise(firsts))
        yield firsts[rank], self._own
        for hop in range(1, size):
            needed = tuple(owned[(each + hop) % size] for each in range(size))
            plan = plan_for(owned, needed, rank)
            message = move(data.comm, plan, self._own.reshape(1, -1), name="neighbours")
            yield firsts[(rank + hop) % size], message.view(-1, width)

    def _prepared(self, rows: Tensor) -> Tensor:
        """Rows of which distances are computed: for `cosine` of length 1, or 0."""
        if self.metric == EUCLIDEAN:
            return rows
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return rows / torch.where(lengths == 0, 1.0, lengths)

    def _better(self, best: Best, queries: Tensor, block: Tensor, first: int, wanted: int) -> Best:
        """The nearest among those so far, and the rows of a block from index `first`."""
        quick, noise = self._quick(queries, block)
        distances, indices = best
        limit = distances[:, -1:]
        if distances.shape[1] < wanted:
            limit = quick.topk(min(wanted, len(block)), dim=1, largest=False).values[:, -1:]
        # all candidates that may be nearest within the rounding error
        rows, chosen = (quick <= limit + 2 * noise).nonzero(as_tuple=True)
        exact, columns = _padded(
            rows, len(queries), self._exact(queries, block, rows, chosen), chosen
        )
        distances = torch.cat([distances, exact], 1)
        indices = torch.cat([indices, columns + first], 1)
        by_index = indices.argsort(1)
        distances, indices = distances.gather(1, by_index), indices.gather(1, by_index)
        order = distances.argsort(dim=1, stable=True)[:, :wanted]
        return distances.gather(1, order), indices.gather(1, order)

    def _quick(self, queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Distances (queries, rows) from products, and their error bounds per query.

        The cosine distance is 1 minus the cosine of the angle; 1 for a row of zeros.
        """
        if self.metric == COSINE:
            return 1 - queries @ rows.T, torch.full_like(queries[:, :1], _NOISE)
        lengths = queries.square().sum(1, keepdim=True), rows.square().sum(1)
        squares = torch.addmm(lengths[0] + lengths[1], queries, rows.T, alpha=-2)
        return squares, _NOISE * (lengths[0] + lengths[1].max())

    def _exact(self, queries: Tensor, block: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Exact distances of pairs of queries and rows."""
        parts = []
        for some in torch.split(
            torch.stack([rows, columns]), max(1, _GATHERED // block.shape[1]), 1
        ):
            one, other = queries[some[0]], block[some[1]]
            if self.metric == COSINE:
                parts.append((1 - (one * other).sum(1)).clamp(0, 2))
            else:
                parts.append((one - other).square().sum(1))
        return torch.cat(parts)


def _none(queries: Tensor) -> Best:
    shape = len(queries), 0
    return queries.new_empty(shape), torch.empty(shape, dtype=torch.int64)


def _padded(rows: Tensor, count: int, values: Tensor, columns: Tensor) -> Best:
    """Values and columns grouped by row, (count, most), padded with infinity."""
    counts = torch.bincount(rows, minlength=count)
    place = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    shape = count, int(counts.max())
    padded, padded_columns = values.new_full(shape, torch.inf), columns.new_zeros(shape)
    padded[rows, place], padded_columns[rows, place] = values, columns
    return padded, padded_columns
