"""k-means on rows divided over ranks.

Initial centres are those of Arthur and Vassilvitskii, "k-means++: The Advantages of Careful
Seeding", 2007 (section 2.2; the greedy variant of section 7 with 2 + log k trials), followed by
Lloyd's iterations; a cluster without rows keeps its centre. Draws depend on the seed and the order
of all rows, not on the number of ranks.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from spatialdl.inference.analysis.rows import Array, Comm, DividedRows, Estimator, positive

_NOISE = 1e-13  # rounding error of a squared distance, relative to the squared norms


class KMeans(Estimator):
    """k-means clustering of rows divided over ranks.

    Args:
        n_clusters: number of clusters.
        init: `k-means++`, or the initial centres, (clusters, width).
        n_init: number of initialisations; the best run is kept.
        max_iter: maximum number of iterations.
        tol: tolerance of the movement of centres, relative to the variance of the features.
        random_state: seed, the same on all ranks.
        comm: communicator of mpi4py or of this package; None: single process.

    Attributes:
        cluster_centers_: (clusters, width).
        labels_: (rows,), clusters of this rank's rows.
        inertia_: sum of squared distances to the nearest centre, over all ranks.
        n_iter_: iterations of the best run.
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        n_init: int | str = "auto",
        max_iter: int = 300,
        tol: float = 1e-4,
        random_state: int | None = 0,
        comm: Comm = None,
    ) -> None:
        self.n_clusters, self.init, self.n_init = n_clusters, init, n_init
        self.max_iter, self.tol, self.random_state = max_iter, tol, random_state
        self.comm = comm

    def fit(self, X: Any, y: object = None) -> Self:  # noqa: N803
        """Fit the clusters; all ranks must call it with their own rows.

        Raises:
            ValueError: on all ranks: fewer rows than clusters, or invalid rows.
        """
        count = positive("n_clusters", self.n_clusters)
        positive("max_iter", self.max_iter)
        seeds = isinstance(self.init, str)
        if seeds and self.init != "k-means++":
            raise ValueError(f"init={self.init!r} must be 'k-means++' or an array of centres")
        times = 1 if self.n_init == "auto" or not seeds else positive("n_init", self.n_init)
        data = DividedRows(X, self.comm)
        if data.total < count:
            raise ValueError(f"n_clusters={count} is more than the {data.total} rows on all ranks")
        seed = self.random_state
        fresh = int(np.random.RandomState().randint(2**31 - 1)) if seed is None else seed
        rng = np.random.RandomState(data.comm.bcast(fresh))
        threshold = self.tol * float(data.variation.sum() / (data.total * data.width))
        results = []
        for _ in range(times):
            centres = _seeded(data, count, rng) if seeds else self._initial(data, count) - data.mean
            results.append(_lloyd(data, centres, self.max_iter, threshold))
        self._take(data, *min(results, key=lambda result: result[0].inertia))
        return self

    def _initial(self, data: DividedRows, count: int) -> Tensor:
        centres = torch.as_tensor(np.asarray(self.init), dtype=torch.float64)
        if tuple(centres.shape) != (count, data.width):
            raise ValueError(
                f"init has shape {tuple(centres.shape)}, expected ({count}, {data.width})"
            )
        return centres

    def _take(self, data: DividedRows, step: _Step, centres: Tensor, iterations: int) -> None:
        self.cluster_centers_ = (centres + data.mean).numpy()
        self.labels_ = step.labels.numpy()
        self.inertia_, self.n_iter_ = step.inertia, iterations
        self.n_features_in_ = data.width
        filled = int((step.counts > 0).sum())
        if filled < len(centres) and data.comm.rank == 0:
            warnings.warn(
                f"only {filled} of {len(centres)} clusters have rows: there are fewer distinct "
                "rows than clusters, or k-means has not converged",
                stacklevel=3,
            )

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Nearest centre of each row, (rows,); without communication."""
        return np.asarray(self._distances(X).argmin(1), dtype=np.int64)

    def transform(self, X: Any) -> Array:  # noqa: N803
        """Distance of each row to each centre, (rows, clusters); without communication."""
        return np.asarray(np.sqrt(self._distances(X)))

    def _distances(self, values: Any) -> Array:
        """Squared distances, (rows, clusters)."""

        def of(block: Tensor) -> Tensor:
            centre = torch.from_numpy(self.cluster_centers_)
            middle = centre.mean(0)
            return squared_distances(block - middle, centre - middle)

        return self._applied(values, of)


def squared_distances(rows: Tensor, others: Tensor) -> Tensor:
    """Squared euclidean distances, (rows, others); 0 below the rounding error."""
    lengths = rows.square().sum(1, keepdim=True) + others.square().sum(1)
    squares = torch.addmm(lengths, rows, others.T, alpha=-2)
    return squares.masked_fill_(squares <= _NOISE * lengths, 0)


class _Step(NamedTuple):
    """Results of a pass over the rows.

    Attributes:
        labels: (rows,), clusters of this rank's rows.
        sums: (clusters, width), sums of the rows of each cluster over all ranks.
        counts: (clusters,), numbers of rows on all ranks.
        inertia: sum of squared distances to the centres over all ranks.
        changed: number of changed labels on all ranks.
    """

    labels: Tensor
    sums: Tensor
    counts: Tensor
    inertia: float
    changed: int


# --- k-means++


def _seeded(data: DividedRows, clusters: int, rng: np.random.RandomState) -> Tensor:
    """Draw initial centres from the rows."""
    trials = 2 + int(math.log(clusters))
    first = min(int(rng.random_sample() * data.total), data.total - 1)
    own = first - data.first
    mine = own if 0 <= own < data.rows.count else None
    chosen = [data.fetch([mine])[0] - data.mean]
    closest = torch.full((data.rows.count,), torch.inf, dtype=torch.float64)
    closest, _ = _closer(data, closest, chosen[0][None])
    closest = closest[0]
    for _ in range(1, clusters):
        local = _draw(data, closest, rng.uniform(size=trials))
        candidates = data.fetch(local) - data.mean
        closer, potentials = _closer(data, closest, candidates)
        best = int(potentials.argmin())
        closest = closer[best]
        chosen.append(candidates[best])
    return torch.stack(chosen)


def _closer(data: DividedRows, closest: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances (candidates, own rows) with each candidate as a centre; global sums."""
    mean = data.mean
    closer = closest.repeat(len(candidates), 1)

    def add(sums: list[Tensor], place: slice, block: Tensor) -> None:
        squares = squared_distances(block - mean, candidates).T
        closer[:, place] = torch.minimum(closer[:, place], squares)
        sums[0].add_(closer[:, place].sum(1))

    [potentials] = data.sums([(len(candidates),)], add)
    return closer, potentials


def _draw(data: DividedRows, closest: Tensor, uniform: Array) -> list[int | None]:
    """Draw rows by squared distance: this rank's indices, None for rows of other ranks."""
    running = closest.cumsum(0)
    own = float(running[-1]) if len(running) else 0.0
    ends = list(accumulate(data.comm.allgather(own)))
    last = max(rank for rank, count in enumerate(data.counts) if count)
    drawn: list[int | None] = []
    for value in uniform * ends[-1]:
        owner = min(bisect_left(ends, value), last)
        while not data.counts[owner]:
            owner += 1
        before = ends[owner - 1] if owner else 0.0
        at = int(torch.searchsorted(running, float(value) - before)) if len(running) else 0
        drawn.append(min(at, len(running) - 1) if owner == data.comm.rank else None)
    return drawn


# --- Lloyd's iterations


def _lloyd(data: DividedRows, centres: Tensor, most: int, tol: float) -> tuple[_Step, Tensor, int]:
    """Run Lloyd's iterations until convergence.

    Returns:
        Results of a final pass, the centres, and the number of iterations.
    """
    labels = torch.full((data.rows.count,), -1)
    iterations = 0
    while iterations < most:
        iterations += 1
        step = _assign(data, centres, labels)
        filled = step.counts[:, None] > 0
        moved = torch.where(filled, step.sums / step.counts.clamp(min=1)[:, None], centres)
        shift = float((moved - centres).square().sum())
        centres, labels = moved, step.labels
        if not step.changed or shift <= tol:
            break
    return _assign(data, centres, labels), centres, iterations


def _assign(data: DividedRows, centres: Tensor, before: Tensor) -> _Step:
    mean = data.mean
    labels = torch.empty_like(before)
    numbers = torch.arange(len(centres))

    def add(sums: list[Tensor], place: slice, block: Tensor) -> None:
        rows = block - mean
        squares = squared_distances(rows, centres)
        labels[place] = nearest = squares.argmin(1)
        member = (nearest == numbers[:, None]).double()
        sums[0].addmm_(member, rows)
        sums[1].add_(member.sum(1))
        sums[2].add_(squares.gather(1, nearest[:, None]).sum())
        sums[3].add_((nearest != before[place]).sum())

    shapes = [tuple(centres.shape), (len(centres),), (), ()]
    total, counts, inertia, changed = data.sums(shapes, add)
    return _Step(labels, total, counts, float(inertia), int(changed))
