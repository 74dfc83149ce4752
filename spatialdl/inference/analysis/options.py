"""Command-line options of `spatialdl-analyze`."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

from spatialdl.common.text import positive_int

KMEANS, PCA, TSVD, RIDGE, NEIGHBOURS = METHODS = ("kmeans", "pca", "tsvd", "ridge", "neighbours")
_ABOUT = {
    KMEANS: "clusters of tiles, with maps of the slides",
    PCA: "principal components of tiles",
    TSVD: "the truncated singular value decomposition of tiles",
    RIDGE: "a number or a class per slide, predicted from its features",
    NEIGHBOURS: "the nearest tiles of query tiles",
}
_ALPHAS = [10.0**k for k in range(-3, 7)]


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
    add("--device", default="cpu", help="cpu, or an accelerator such as cuda (%(default)s)")
    add(
        "--ranks",
        type=positive_int,
        metavar="N",
        help="launch N ranks by mpiexec, or by srun in a Slurm job",
    )


def _add_seed(one: ArgumentParser) -> None:
    one.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")


def _add_slides(one: ArgumentParser, use: str) -> None:
    one.add_argument(
        "--slides", nargs="+", default=[], metavar="PATH", help=f"slides, or folders of them: {use}"
    )


def _add_kmeans(one: ArgumentParser) -> None:
    add = one.add_argument
    add("-k", "--clusters", type=positive_int, default=8, metavar="K", help="(%(default)s)")
    add("--n-init", type=positive_int, default=1, metavar="N", help="runs; keeps the best (1)")
    add("--max-iter", type=positive_int, default=300, metavar="N", help="(%(default)s)")
    _add_seed(one)
    _add_slides(one, "background of the cluster maps")
    add("--maps", type=int, default=12, metavar="N", help="number of slides to map (12)")
    add("--geojson", action="store_true", help="also write GeoJSON of the clusters for QuPath")


def _add_projection(one: ArgumentParser) -> None:
    add = one.add_argument
    add("-n", "--components", type=_components, default=16, metavar="N", help="(%(default)s)")
    add("--solver", choices=("auto", "exact", "randomized"), default="auto", help="(%(default)s)")
    _add_seed(one)
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


def _components(text: str) -> int | float:
    if "." in text:
        try:
            if 0 < float(text) < 1:
                return float(text)
        except ValueError:
            pass
        raise ArgumentTypeError(f"{text!r} is neither a number nor a share such as 0.9")
    return positive_int(text)


def check(options: argparse.Namespace) -> None:
    """Check combinations of options.

    Raises:
        ValueError: an invalid combination, or an output folder that is not empty.
    """
    if options.method in (PCA, TSVD) and (options.labels is None) != (options.column is None):
        raise ValueError("--labels and --column must be used together")
    if options.method == TSVD and isinstance(options.components, float):
        raise ValueError(f"tsvd needs a number of components, got {options.components}")
    if options.method == RIDGE:
        if (options.labels is None) != (options.target is None):
            raise ValueError("--labels and --target must be used together")
        if options.labels is None and options.apply is None:
            raise ValueError("ridge needs --labels CSV --target NAME")
    if options.method == NEIGHBOURS and not (options.query or options.all):
        raise ValueError("neighbours needs --query SLIDE:ROW ..., or --all for every tile")
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out} is a file: use a new folder")
    if options.out.is_dir() and any(options.out.iterdir()):
        raise ValueError(f"--out {options.out} is not empty: use a new folder")
