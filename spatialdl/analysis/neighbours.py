"""Exact nearest neighbours among rows divided over ranks.

Queries stay on their rank; rows circulate over the ranks, and each query keeps the nearest so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from spatialdl.analysis.estimator import Array, Estimator, numpy, positive
from spatialdl.analysis.ranks import Comm
from spatialdl.analysis.rows import ArrayRows, DividedRows, Rows
from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.communicator import Pending
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.plan import plan_for
from spatialdl.parallel.layout import Box

_QUERIES, _ROWS = 256, 1024  # size of a block of distances
_GATHERED = 2**18  # numbers gathered at once to compute exact distances of candidates
_NOISE = 1e-13  # rounding error of a distance from products, relative to the squared norms


class NearestNeighbors(Estimator):
    """Exact nearest neighbours among the rows of all ranks.

    Ties are ordered by index, so results are the same on any number of ranks.

    Args:
        n_neighbors: number of neighbours per query.
        metric: `euclidean` or `cosine`.
        comm: communicator of mpi4py or of this package; None: single process.
        device: device of the computation.

    Attributes:
        n_samples_fit_: rows of all ranks.
    """

    n_samples_fit_: int

    def __init__(
        self,
        n_neighbors: int = 5,
        *,
        metric: str = "euclidean",
        comm: Comm = None,
        device: str = "cpu",
    ) -> None:
        self.n_neighbors, self.metric = n_neighbors, metric
        self.comm, self.device = comm, device

    def fit(self, X: Any, y: object = None) -> Self:  # noqa: N803
        """Keep this rank's rows in memory; all ranks must call it.

        Raises:
            ValueError: on all ranks: invalid rows.
        """
        if self.metric not in _METRICS:
            raise ValueError(f"metric={self.metric!r} must be one of {', '.join(_METRICS)}")
        data = DividedRows(X, self.comm, self.device)
        self._data, self._own = data, data.ranks.together(lambda: _whole(data))
        self.n_features_in_, self.n_samples_fit_ = data.width, data.total
        return self

    def kneighbors(
        self,
        X: Any = None,  # noqa: N803
        n_neighbors: int | None = None,
        return_distance: bool = True,
    ) -> Any:
        """Find the nearest rows of this rank's queries; all ranks must call it.

        Args:
            X: queries (rows, width), possibly empty on a rank; None: the rows of `fit`, each
                without itself. It must be None on all ranks or on none.
            n_neighbors: number of neighbours, instead of that of the constructor.
            return_distance: whether to return distances.

        Returns:
            Distances and indices (queries, neighbours), nearest first; or indices only. Indices
            count the rows of all ranks, in the order of the ranks.

        Raises:
            ValueError: on all ranks: fewer rows than neighbours, or invalid queries.
        """
        data, ranks = self._fitted(), self._data.ranks
        wanted = positive("n_neighbors", self.n_neighbors if n_neighbors is None else n_neighbors)
        itself = X is None
        if len(set(ranks.comm.allgather((itself, wanted)))) > 1:
            raise ValueError("X is None on some ranks only, or n_neighbors differ between ranks")
        available = data.total - itself
        if wanted > available:
            raise ValueError(f"n_neighbors={wanted} is more than the {available} rows on all ranks")
        queries: Rows = (
            ArrayRows(self._own) if itself else ranks.together(lambda: self._fitted_rows(X))
        )
        values = ranks.together(lambda: [block for _, block in queries.blocks(data.device)])
        search = _Search(values, wanted, _METRICS[self.metric], data.first if itself else None)
        for first, part in self._circulate():
            search.add(part.to(data.device), first)
        distances, indices = search.found(data.width)
        return (distances, indices) if return_distance else indices

    def _fitted(self) -> DividedRows:
        if not hasattr(self, "_data"):
            raise ValueError("NearestNeighbors is not fitted: call fit first")
        return self._data

    def _circulate(self) -> Iterator[tuple[int, Tensor]]:
        """Rows of each rank in their stored dtype, this rank's first, with their first index.

        Each part is received from its owner while the previous part is processed.
        """
        data, size = self._data, self._data.ranks.size
        rank, width = data.ranks.rank, data.width
        firsts = list(accumulate(data.counts, initial=0))
        owned = tuple(Box(((0, 1), (a * width, b * width))) for a, b in pairwise(firsts))
        message, pending = self._own.reshape(1, -1), None
        for hop in range(size):
            following: tuple[Tensor, Pending] | None = None
            if hop + 1 < size:
                needed = tuple(owned[(each + hop + 1) % size] for each in range(size))
                plan = plan_for(owned, needed, rank)
                room = message.new_empty(plan.need.shape)
                sends = [BoxedTensor(self._own.reshape(1, -1), plan.own)]
                exchange = Exchange(plan, sends, [BoxedTensor(room, plan.need)], room.device)
                following = room, start_exchange(data.ranks.comm, exchange, "neighbours")
            if pending is not None:
                pending.wait()
            yield firsts[(rank + hop) % size], message.view(-1, width)
            if following is not None:
                message, pending = following


def _whole(data: DividedRows) -> Tensor:
    """This rank's rows in the common dtype of all ranks, checked."""
    rows = data.rows
    own = torch.empty((rows.count, data.width), dtype=data.dtype)
    for start, stop in rows.spans():
        rows.block(start, stop, torch.device("cpu"))  # raises on NaN and infinity
        own[start:stop] = rows.read(start, stop).cpu()
    return own


class _Euclidean(NamedTuple):
    """Euclidean metric; distances are squared until the results are returned."""

    @staticmethod
    def prepared(rows: Tensor) -> Tensor:
        return rows

    @staticmethod
    def quick(queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Distances (queries, rows) from products, and their error bounds per query."""
        lengths = queries.square().sum(1, keepdim=True), rows.square().sum(1)
        squares = torch.addmm(lengths[0] + lengths[1], queries, rows.T, alpha=-2)
        return squares, _NOISE * (lengths[0] + lengths[1].max())

    @staticmethod
    def exactly(queries: Tensor, candidates: Tensor) -> Tensor:
        return (queries - candidates).square().sum(1)

    @staticmethod
    def shown(distances: Tensor) -> Tensor:
        return distances.sqrt()


class _Cosine(NamedTuple):
    """Cosine metric: 1 minus the cosine of the angle; 1 for a row of zeros."""

    @staticmethod
    def prepared(rows: Tensor) -> Tensor:
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return rows / torch.where(lengths == 0, 1.0, lengths)

    @staticmethod
    def quick(queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return 1 - queries @ rows.T, torch.full_like(queries[:, :1], _NOISE)

    @staticmethod
    def exactly(queries: Tensor, candidates: Tensor) -> Tensor:
        return (1 - (queries * candidates).sum(1)).clamp(0, 2)

    @staticmethod
    def shown(distances: Tensor) -> Tensor:
        return distances


_METRICS: dict[str, type[_Euclidean] | type[_Cosine]] = {
    "euclidean": _Euclidean,
    "cosine": _Cosine,
}


def _padded(rows: Tensor, count: int, values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Values and columns grouped by row, (count, most), padded with infinity."""
    counts = torch.bincount(rows, minlength=count)
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = count, int(counts.max())
    padded, padded_columns = values.new_full(shape, torch.inf), columns.new_zeros(shape)
    padded[rows, place], padded_columns[rows, place] = values, columns
    return padded, padded_columns


class _Search:
    """Search state: the nearest rows so far of a rank's queries.

    Args:
        queries: blocks, (rows, width).
        wanted: number of neighbours per query.
        metric: distance.
        own: index of the first query among all rows, to exclude each row from its own neighbours;
            None if the queries are other rows.
    """

    def __init__(
        self,
        queries: list[Tensor],
        wanted: int,
        metric: type[_Euclidean] | type[_Cosine],
        own: int | None,
    ) -> None:
        self._metric, self._wanted, self._own = metric, wanted, own
        self._queries = [
            metric.prepared(part) for one in queries for part in torch.split(one, _QUERIES)
        ]
        self._best = [
            (one.new_empty(len(one), 0), torch.empty(len(one), 0, dtype=torch.int64).to(one.device))
            for one in self._queries
        ]

    def add(self, rows: Tensor, first: int) -> None:
        """Search further rows; `first` is the index of the first of them."""
        for start in range(0, len(rows), _ROWS):
            block = self._metric.prepared(rows[start : start + _ROWS].double())
            before = 0
            for number, queries in enumerate(self._queries):
                own = None if self._own is None else self._own + before
                self._best[number] = self._better(number, queries, block, first + start, own)
                before += len(queries)

    def _better(
        self, number: int, queries: Tensor, block: Tensor, first: int, own: int | None
    ) -> tuple[Tensor, Tensor]:
        quick, noise = self._metric.quick(queries, block)
        if own is not None:
            itself = own + torch.arange(len(queries), device=block.device) - first
            inside = (itself >= 0) & (itself < len(block))
            quick[inside.nonzero()[:, 0], itself[inside]] = torch.inf
        distances, indices = self._best[number]
        limit = distances[:, -1:]
        if distances.shape[1] < self._wanted or torch.isinf(limit).any():
            wanted = min(self._wanted, len(block))
            limit = quick.topk(wanted, dim=1, largest=False).values[:, -1:]
        # all candidates that may be nearest within the rounding error
        rows, chosen = (quick <= limit + 2 * noise).nonzero(as_tuple=True)
        values = self._exact(queries, block, rows, chosen)
        values[quick[rows, chosen] == torch.inf] = torch.inf
        exact, columns = _padded(rows, len(queries), values, chosen)
        distances = torch.cat([distances, exact], 1)
        indices = torch.cat([indices, columns + first], 1)
        by_index = indices.argsort(1)
        distances, indices = distances.gather(1, by_index), indices.gather(1, by_index)
        order = distances.argsort(dim=1, stable=True)[:, : self._wanted]
        return distances.gather(1, order), indices.gather(1, order)

    def _exact(self, queries: Tensor, block: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Exact distances of pairs of queries and rows."""
        step = max(1, _GATHERED // block.shape[1])
        parts = [
            self._metric.exactly(queries[some], block[chosen])
            for some, chosen in zip(
                torch.split(rows, step), torch.split(columns, step), strict=True
            )
        ]
        return torch.cat(parts)

    def found(self, width: int) -> tuple[Array, Array]:
        """Distances and indices (queries, neighbours)."""
        none = np.empty((0, self._wanted))
        distances = [numpy(self._metric.shown(best)) for best, _ in self._best]
        indices = [numpy(index) for _, index in self._best]
        return np.concatenate([none, *distances]), np.concatenate([none.astype(int), *indices])
