"""Analysis of features on ranks against scikit-learn on as many threads."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import (
    Lines,
    add_numbers,
    alternate,
    markdown,
    median_ratio,
    origin,
    parser_of,
    publish,
    run_ranks,
    start,
)
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.world import start_world
from spatialdl.inference.analysis import PCA, KMeans, NearestNeighbors, Ridge, TruncatedSVD

OURS, THEIRS = "spatialdl", "scikit-learn"
METHODS = {
    "kmeans": "k-means, 16 clusters, 10 iterations",
    "pca": "PCA, 16 components, exact",
    "tsvd": "truncated SVD, 16 components",
    "ridge": "ridge regression, 4 targets",
    "neighbours": "16 nearest rows of 1,000",
}
_QUERIES, _WARM = 1000, 2000
Method = Callable[[Any, Any, Any], float]


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    sides = {}
    for count in options.ranks:
        for library, ranks, threads in ((OURS, count, 1), (THEIRS, 1, count)):
            given = argparse.Namespace(**{**vars(options), "library": library})
            run = partial(run_ranks, "analysis", given, ranks, threads=threads)
            sides[f"{library}, {count}"] = run
    found = alternate(sides, options.rounds)
    check_alike([run["values"] for runs in found.values() for run in runs])
    rows = []
    for method in METHODS:
        for count in options.ranks:
            ours, theirs = (
                [run["seconds"][method] for run in found[f"{library}, {count}"]]
                for library in (OURS, THEIRS)
            )
            ratio = median_ratio(theirs, ours)
            row = {"method": method, "ranks": count, OURS: ours, THEIRS: theirs}
            rows.append({**row, "times_as_fast": ratio})
    result = {**origin("analysis", arguments), "options": vars(options), "rows": rows}
    panels = [
        Lines(
            *(title, "ranks or threads", "seconds"),
            {
                library: [
                    (row["ranks"], statistics.median(row[library]))
                    for row in rows
                    if row["method"] == method
                ]
                for library in (OURS, THEIRS)
            },
        )
        for method, title in METHODS.items()
    ]
    publish(result, table(result), panels, Path(options.out) / "analysis")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("analysis", __doc__)
    add_numbers(
        parser,
        ranks=([1, 2, 4], 1, "ranks or threads"),
        rows=(40_000, 2000, "rows on all ranks together"),
        width=(256, 32, "features per row"),
        rounds=(3, 1, "rounds"),
    )
    return parser.parse_args(arguments)


def check_alike(values: Sequence[dict[str, float]]) -> None:
    """Check that one value of each result is the same in all runs.

    Raises:
        RuntimeError: results differ.
    """
    for method in METHODS:
        these = [one[method] for one in values]
        spread = max(these) - min(these)
        if spread > 1e-8 * max(1.0, abs(these[0])):
            raise RuntimeError(f"{method}: results differ by {spread:.3g} between runs: {these}")


def table(result: dict[str, Any]) -> list[str]:
    """Table of seconds by method and number of ranks."""
    options = result["options"]
    titles = ["method", "ranks or threads", f"{OURS}, s", f"{THEIRS}, s", "times as fast"]
    rows = [
        [
            *(METHODS[row["method"]], str(row["ranks"])),
            *(f"{statistics.median(row[library]):.3f}" for library in (OURS, THEIRS)),
            f"{row['times_as_fast']:.2f}",
        ]
        for row in result["rows"]
    ]
    about = f"{options['rows']:,} rows of {options['width']} numbers in float64; medians of "
    about += f"{options['rounds']} rounds, results equal to 1e-8"
    return [*markdown(titles, rows), "", about]


# --- ranks


def work(options: argparse.Namespace) -> dict[str, Any] | None:
    """Seconds of each method on the slowest rank, and one value of each result."""
    features, targets = data(options.rows, options.width)
    world = start_world()
    if options.library == OURS:
        torch.set_num_threads(1)
        methods = ours(features, world)
    else:
        methods = theirs(features)
    found, own, warm = {}, _share(len(features), world), _share(_WARM, world)
    for name, method in methods.items():
        method(features[warm], targets[warm], features[: 16 if world.rank == 0 else 0])
        world.barrier()
        began = time.perf_counter()
        queries = features[_share(_QUERIES, world)] + 0.5
        value = method(features[own], targets[own], queries)
        found[name] = max(world.allgather(time.perf_counter() - began)), value
    seconds, values = ({name: one[k] for name, one in found.items()} for k in (0, 1))
    return {"seconds": seconds, "values": values} if world.rank == 0 else None


def data(rows: int, width: int) -> tuple[Any, Any]:
    """Clustered features with a decaying spectrum, and 4 targets; the same in every process."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(16, width)) * 2
    features = centres[rng.integers(0, 16, rows)] + rng.normal(size=(rows, width))
    features *= 0.97 ** np.arange(width)
    return features, features @ rng.normal(size=(width, 4)) + rng.normal(size=(rows, 4))


def _share(rows: int, world: Communicator) -> slice:
    """This rank's share of a number of rows."""
    return slice(rows * world.rank // world.size, rows * (world.rank + 1) // world.size)


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
        "tsvd": lambda own, _, __: _first(TruncatedSVD(16, comm=world).fit(own)),
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
            decomposition.TruncatedSVD(16, algorithm="arpack", random_state=0).fit(rows)
        ),
        "ridge": lambda rows, y, _: float(
            np.abs(linear_model.Ridge(solver="cholesky").fit(rows, y).coef_).sum()
        ),
        "neighbours": near,
    }


def _first(model: Any) -> float:
    """Largest singular value, which does not depend on the solver."""
    return float(model.singular_values_[0])


if __name__ == "__main__":
    start(main)
