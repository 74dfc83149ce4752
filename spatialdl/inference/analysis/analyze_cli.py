"""The command `spatialdl-analyze METHOD FEATURES... --out DIR`.

It runs in a single process, under mpiexec or srun, or launches ranks itself.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spatialdl.common.text import counted, positive_int, print_lines
from spatialdl.inference.predicting.loop import RankCommand, agreeing

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

KMEANS, PCA, TSVD, RIDGE, NEIGHBOURS = METHODS = ("kmeans", "pca", "tsvd", "ridge", "neighbours")
_ABOUT = {
    KMEANS: "clusters of tiles, with maps of the slides",
    PCA: "principal components of tiles",
    TSVD: "the truncated singular value decomposition of tiles",
    RIDGE: "a number or a class per slide, predicted from its features",
    NEIGHBOURS: "the nearest tiles of query tiles",
}
_ALPHAS = [10.0**k for k in range(-3, 7)]


def main(argv: Sequence[str] | None = None) -> int:
    """Fit a model to features of tiles, or apply a saved model.

    Args:
        argv: arguments of the command; those of the process if None.

    Returns:
        The exit code: 0; 1 on an error; 2 for invalid arguments; 130 or 143 if interrupted or
        terminated.
    """

    def parse(words: Sequence[str]) -> argparse.Namespace:
        return parser().parse_args(words)

    return RankCommand("spatialdl.inference.analysis.analyze_cli", parse, check, _run).main(argv)


def _run(options: argparse.Namespace, world: Communicator) -> int:
    with agreeing(world):  # most errors are raised on all ranks
        _analyze(options, world)
    return 0


def _analyze(options: argparse.Namespace, world: Communicator) -> None:
    from spatialdl.common.files import save_json
    from spatialdl.inference.analysis import methods
    from spatialdl.inference.analysis.cohort import Cohort
    from spatialdl.inference.analysis.regression import regress

    began = time.monotonic()
    with agreeing(world):
        if world.rank == 0:
            check(options)
    cohort = Cohort(options.features, world)
    with agreeing(world):
        options.out.mkdir(parents=True, exist_ok=True)
    run = {
        KMEANS: methods.cluster,
        PCA: methods.project,
        TSVD: methods.project,
        RIDGE: regress,
        NEIGHBOURS: methods.search,
    }[options.method]
    found = run(options, cohort)
    summary = {
        "method": options.method,
        "slides": len(cohort.files),
        "tiles": cohort.tiles,
        "width": cohort.width,
        "ranks": world.size,
        "seconds": round(time.monotonic() - began, 3),
        **found,
    }
    if world.rank == 0:
        nan = [key for key, v in summary.items() if isinstance(v, float) and math.isnan(v)]
        save_json(options.out / "summary.json", summary | dict.fromkeys(nan))  # JSON has no NaN
        print_lines(_report(options, summary, found))


def _report(options: argparse.Namespace, summary: dict[str, Any], found: dict[str, Any]) -> str:
    lines = [
        f"{options.method}: {counted(summary['tiles'], 'tile')} of "
        f"{counted(summary['slides'], 'slide')}, {summary['width']} features each, on "
        f"{counted(summary['ranks'], 'rank')} in {summary['seconds']:.1f} s"
    ]
    for key, value in found.items():
        if key == "slides_not_shown":
            lines += [f"not shown: {text}" for text in value.values()]
            continue
        texts = [_short(one) for one in (value if isinstance(value, list) else [value])]
        more = " ..." if len(texts) > 12 else ""
        lines.append(f"{key.replace('_', ' ')}: {', '.join(texts[:12])}{more}")
    return "\n".join([*lines, f"written: {options.out}"])


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


# --- options


def parser() -> ArgumentParser:
    """Build the parser of the command line."""
    made = ArgumentParser(
        prog="spatialdl-analyze",
        description="Cluster, project and search features of tiles in HDF5 files as of CLAM and "
        "TRIDENT, in a single process or on ranks of mpiexec or srun, with the same results.",
    )
    methods = made.add_subparsers(dest="method", required=True, metavar="METHOD")
    for name, about in _ABOUT.items():
        one = methods.add_parser(name, help=about, description=f"Find {about}.")
        _add_common(one)
        _ADD[name](one)
        if name != NEIGHBOURS:
            one.add_argument(
                "--apply", type=Path, metavar="MODEL", help="apply a model.npz instead of learning"
            )
    return made


def _add_common(one: ArgumentParser) -> None:
    add = one.add_argument
    add("features", type=Path, nargs="+", metavar="FEATURES", help="files *.h5, or folders of them")
    add("--out", type=Path, required=True, metavar="DIR", help="new folder for the results")
    add("--device", "--solver", type=_removed, help=argparse.SUPPRESS)
    add(
        "--ranks",
        type=positive_int,
        metavar="N",
        help="launch N ranks by mpiexec, or by srun in a Slurm job",
    )


def _add_slides(one: ArgumentParser, use: str) -> None:
    one.add_argument(
        "--slides", nargs="+", default=[], metavar="PATH", help=f"slides, or folders of them: {use}"
    )


def _add_kmeans(one: ArgumentParser) -> None:
    add = one.add_argument
    add("-k", "--clusters", type=positive_int, default=8, metavar="K", help="(%(default)s)")
    add("--n-init", type=positive_int, default=1, metavar="N", help="runs; keeps the best (1)")
    add("--max-iter", type=positive_int, default=300, metavar="N", help="(%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    _add_slides(one, "background of the cluster maps")
    add("--maps", type=int, default=12, metavar="N", help="number of slides to map (12)")
    add("--geojson", action="store_true", help="also write GeoJSON of the clusters for QuPath")


def _add_projection(one: ArgumentParser) -> None:
    add = one.add_argument
    add("-n", "--components", type=_components, default=16, metavar="N", help="(%(default)s)")
    add("--labels", type=Path, metavar="CSV", help="a table with a column slide")
    add("--column", metavar="NAME", help="column of the table that colours the picture")
    add(
        "--points",
        type=positive_int,
        default=20_000,
        metavar="N",
        help="points in the picture (%(default)s)",
    )


def _add_ridge(one: ArgumentParser) -> None:
    add = one.add_argument
    add("--labels", type=Path, metavar="CSV", help="a table with a column slide")
    add("--target", metavar="NAME", help="column of the table to predict")
    add("--classes", action="store_true", help="the column has classes, not numbers")
    add("--group", metavar="NAME", help="column such as patient; a group stays in one fold")
    add(
        "--level",
        choices=("slide", "tile"),
        default="slide",
        help="fit mean features of slides, or features of tiles (%(default)s)",
    )
    add("--alphas", type=float, nargs="+", default=_ALPHAS, metavar="A", help="(1e-3 to 1e6)")
    add("--folds", type=positive_int, default=5, metavar="N", help="(%(default)s)")


def _add_neighbours(one: ArgumentParser) -> None:
    add = one.add_argument
    add(
        "--query",
        type=query,
        nargs="+",
        default=[],
        metavar="SLIDE:ROW",
        help="query tiles, by slide and row from 0",
    )
    add("--all", action="store_true", help="query every tile: writes a table per slide")
    add("-k", "--neighbours", type=positive_int, default=8, metavar="K", help="(%(default)s)")
    add("--metric", choices=("cosine", "euclidean"), default="cosine", help="(%(default)s)")
    _add_slides(one, "to draw the tiles")


_ADD = {
    KMEANS: _add_kmeans,
    PCA: _add_projection,
    TSVD: _add_projection,
    RIDGE: _add_ridge,
    NEIGHBOURS: _add_neighbours,
}


def query(text: str) -> tuple[str, int]:
    """Parse a slide name and a row.

    Raises:
        ArgumentTypeError: not SLIDE:ROW.
    """
    slide, _, row = text.rpartition(":")
    if not slide or not row.isascii() or not row.isdigit():
        raise ArgumentTypeError(f"{text!r} is not SLIDE:ROW such as slide-1:250")
    return slide, int(row)


def _removed(text: str) -> str:
    raise ArgumentTypeError(f"{text}: analyses are exact and run on CPUs only; leave it out")


def _components(text: str) -> int | float:
    if "." in text:
        try:
            if 0 < float(text) < 1:
                return float(text)
        except ValueError:
            pass
        raise ArgumentTypeError(f"{text!r} is neither a number nor a share such as 0.9")
    return positive_int(text)


def check(options: argparse.Namespace) -> int:
    """Check combinations of options, and return the number of ranks to launch.

    Raises:
        ValueError: an invalid combination, or an output folder that is not empty.
    """
    method, out = options.method, options.out
    one_of = {PCA: "column", TSVD: "column", RIDGE: "target"}.get(method)
    is_half = one_of and (options.labels is None) != (getattr(options, one_of) is None)
    wrong = {
        f"--labels and --{one_of} must be used together": is_half,
        f"tsvd needs a number of components, got {getattr(options, 'components', None)}": (
            method == TSVD and isinstance(options.components, float)
        ),
        "ridge needs --labels CSV --target NAME": (
            method == RIDGE and options.labels is None and options.apply is None
        ),
        "neighbours needs --query SLIDE:ROW ..., or --all for every tile": (
            method == NEIGHBOURS and not (options.query or options.all)
        ),
        f"--out {out} is a file: use a new folder": out.exists() and not out.is_dir(),
        f"--out {out} is not empty: use a new folder": out.is_dir() and any(out.iterdir()),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(message)
    return options.ranks or 1


if __name__ == "__main__":
    sys.exit(main())
