"""Worker of the analysis benchmark: the ranks, or a single process of scikit-learn.

Prints one line of JSON: seconds of each method on the slowest rank, and one value of each result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spatialdl.analysis import PCA, KMeans, NearestNeighbors, Ridge, TruncatedSVD
from spatialdl.bench.analysis import OURS
from spatialdl.bench.device import worker_options
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.world import start_world

_QUERIES, _WARM = 1000, 2000
Method = Callable[[Any, Any, Any], float]


def main() -> None:
    options = worker_options()
    features, targets = made(options.rows, options.width)
    world = start_world()
    found = {}
    if options.library == OURS:
        torch.set_num_threads(1)
        methods = ours(features, world)
    else:
        methods = theirs(features)
    span = share(len(features), world)
    for name, method in methods.items():
        warm = share(_WARM, world)
        method(features[warm], targets[warm], features[: 16 if world.rank == 0 else 0])
        world.barrier()
        began = time.perf_counter()
        queries = features[_queries(world)] + 0.5
        value = method(features[span], targets[span], queries)
        found[name] = max(world.allgather(time.perf_counter() - began)), value
    if world.rank == 0:
        seconds, values = ({name: one[k] for name, one in found.items()} for k in (0, 1))
        print(json.dumps({"seconds": seconds, "values": values}))


def made(rows: int, width: int) -> tuple[Any, Any]:
    """Clustered features with a decaying spectrum, and 4 targets; the same in every process."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(16, width)) * 2
    features = centres[rng.integers(0, 16, rows)] + rng.normal(size=(rows, width))
    features *= 0.97 ** np.arange(width)
    return features, features @ rng.normal(size=(width, 4)) + rng.normal(size=(rows, 4))


def share(rows: int, world: Communicator) -> slice:
    """This rank's share of a number of rows."""
    return slice(rows * world.rank // world.size, rows * (world.rank + 1) // world.size)


def _queries(world: Communicator) -> slice:
    return share(_QUERIES, world)


def ours(features: Any, world: Communicator) -> dict[str, Method]:
    """Methods of spatialdl; each returns one value of its result, the same on all ranks."""
    begin = features[:16]

    def near(own: Any, _: Any, queries: Any) -> float:
        distances = NearestNeighbors(16, comm=world).fit(own).kneighbors(queries)[0]
        return float(sum(world.allgather(float(distances.sum()))))

    return {
        "kmeans": lambda own, _, __: (
            KMeans(16, init=begin, max_iter=10, tol=0, comm=world).fit(own).inertia_
        ),
        "pca": lambda own, _, __: float(PCA(16, comm=world).fit(own).explained_variance_.sum()),
        "tsvd": lambda own, _, __: _first(
            TruncatedSVD(16, algorithm="randomized", n_iter=5, comm=world).fit(own)
        ),
        "ridge": lambda own, y, _: float(np.abs(Ridge(comm=world).fit(own, y).coef_).sum()),
        "neighbours": near,
    }


def theirs(features: Any) -> dict[str, Method]:
    """The same methods of scikit-learn, in a single process."""
    from sklearn import cluster, decomposition, linear_model, neighbors

    begin = features[:16]

    def near(rows: Any, _: Any, queries: Any) -> float:
        model = neighbors.NearestNeighbors(n_neighbors=16, algorithm="brute").fit(rows)
        return float(model.kneighbors(queries)[0].sum())

    return {
        "kmeans": lambda rows, _, __: float(
            cluster.KMeans(16, init=begin, n_init=1, max_iter=10, tol=0).fit(rows).inertia_
        ),
        "pca": lambda rows, _, __: float(
            decomposition.PCA(16, svd_solver="covariance_eigh").fit(rows).explained_variance_.sum()
        ),
        "tsvd": lambda rows, _, __: _first(
            decomposition.TruncatedSVD(16, n_iter=5, random_state=0).fit(rows)
        ),
        "ridge": lambda rows, y, _: float(
            np.abs(linear_model.Ridge(solver="cholesky").fit(rows, y).coef_).sum()
        ),
        "neighbours": near,
    }


def _first(model: Any) -> float:
    """Largest singular value, which does not depend on the random draws."""
    return float(model.singular_values_[0])


if __name__ == "__main__":
    main()
