"""Exact nearest neighbours among rows divided over ranks.

Queries stay where they are; the rows of the ranks circulate, and each query keeps its best.
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

_QUERIES, _ROWS = 256, 1024  # of a block of distances
_GATHERED = 2**18  # numbers of candidates whose distances are computed exactly at once
_NOISE = 1e-13  # of a distance by products, relative to the squared lengths


class NearestNeighbors(Estimator):
    """The nearest of all ranks' rows.

    Rows as near as each other come in the order of their index, so results are the same on any
    number of ranks.

    Args:
        n_neighbors: of each query.
        metric: `euclidean` or `cosine`.
        comm: mpi4py's communicator or this package's; None is a single process.
        device: where to compute.

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
        """Keep this rank's rows in memory, as they are; all ranks must call it.

        Raises:
            ValueError: on all ranks: some rows cannot be used.
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
        """The nearest rows of this rank's queries, nearest first; all ranks must call it.

        Args:
            X: queries (rows, width), of which a rank may have none; None are the rows of `fit`,
                each without itself. It must be None on all ranks or on none.
            n_neighbors: of each, instead of that of the constructor.
            return_distance: whether distances are wanted.

        Returns:
            Distances and indices (queries, neighbours) among the rows of all ranks, in the order of
            the ranks; or indices only.

        Raises:
            ValueError: on all ranks: there are fewer rows, or queries cannot be used.
        """
        data, ranks = self._fitted(), self._data.ranks
        wanted = positive("n_neighbors", self.n_neighbors if n_neighbors is None else n_neighbors)
        itself = X is None
        if len(set(ranks.comm.allgather((itself, wanted)))) > 1:
            raise ValueError("X is None on some ranks only, or n_neighbors differ between ranks")
        there = data.total - itself
        if wanted > there:
            raise ValueError(f"n_neighbors={wanted} is more than the {there} rows on all ranks")
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
        """The rows of each rank as they are stored, the own ones first, with the first's index.

        Each part comes straight from the rank that has it, while the one before is worked on.
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
                what = Exchange(plan, sends, [BoxedTensor(room, plan.need)], room.device)
                following = room, start_exchange(data.ranks.comm, what, "neighbours")
            if pending is not None:
                pending.wait()
            yield firsts[(rank + hop) % size], message.view(-1, width)
            if following is not None:
                message, pending = following


def _whole(data: DividedRows) -> Tensor:
    """This rank's rows in the type that all ranks have in common, checked."""
    rows = data.rows
    own = torch.empty((rows.count, data.width), dtype=data.dtype)
    for start, stop in rows.spans():
        rows.block(start, stop, torch.device("cpu"))  # refuses what is not finite
        own[start:stop] = rows.read(start, stop).cpu()
    return own


class _Euclidean(NamedTuple):
    """Squared distances, while candidates are chosen."""

    @staticmethod
    def prepared(rows: Tensor) -> Tensor:
        return rows

    @staticmethod
    def quick(queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Distances (queries, rows) by products, and how wrong those of a query can be."""
        lengths = queries.square().sum(1, keepdim=True), rows.square().sum(1)
        found = torch.addmm(lengths[0] + lengths[1], queries, rows.T, alpha=-2)
        return found, _NOISE * (lengths[0] + lengths[1].max())

    @staticmethod
    def exactly(queries: Tensor, candidates: Tensor) -> Tensor:
        return (queries - candidates).square().sum(1)

    @staticmethod
    def shown(distances: Tensor) -> Tensor:
        return distances.sqrt()


class _Cosine(NamedTuple):
    """1 minus the cosine of the angle; that of a row of zeros is 1."""

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
    """(count, most): values and columns of each row beside each other, infinity behind the last."""
    counts = torch.bincount(rows, minlength=count)
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = count, int(counts.max())
    distances, found = values.new_full(shape, torch.inf), columns.new_zeros(shape)
    distances[rows, place], found[rows, place] = values, columns
    return distances, found


class _Search:
    """The nearest rows so far of a rank's queries.

    Args:
        queries: blocks, (rows, width).
        wanted: neighbours of each.
        metric: of distances.
        own: index of the first query among all rows, where a row is no neighbour of itself.
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
        """Look among more rows, of which the first has this index."""
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
        # all that may be among the nearest, whatever rounding did to them
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
        """Distances of pairs."""
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
