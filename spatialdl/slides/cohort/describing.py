"""The command that describes a cohort: `spatialdl-cohort SLIDES... --out DIR`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from spatialdl.data.format import Manifest
from spatialdl.data.slide_table import Columns, find_predicted, read_predicted, read_table
from spatialdl.errors import ShardError
from spatialdl.slides.batch.finding_slides import find_slides, slide_names
from spatialdl.slides.batch.labels import slide_index
from spatialdl.slides.cohort.measuring import SlideMeasures, measure_slides
from spatialdl.slides.cohort.page import CohortSlide, members_of, save_cohort
from spatialdl.text import counted, positive_int

_OK, _MISUSED = 0, 2
_MOST_LINES = 20

_SHOWN = ("predicted", "probability_", "risk")  # columns of predictions

Facts = dict[str, dict[str, str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure slides and write the report of their cohort.

    Args:
        argv: arguments of the command; None uses those of the process.

    Returns:
        0, or 2 for invalid arguments; unreadable slides are listed in the report.
    """
    options = _parser().parse_args(argv)
    try:
        names = slide_names(find_slides(options.slides, recursive=options.recursive))
        facts = _facts(options, names)
        tiles = _tiles(options.tiles)
        slides = {name: path for path, name in names.items()}
        measured = measure_slides(slides, jobs=options.jobs)
        members = members_of([_with_tiles(measures, tiles) for measures in measured], facts)
        options.out.mkdir(parents=True, exist_ok=True)
        save_cohort(options.out, members)
    except (ValueError, OSError, ShardError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _MISUSED
    _print(members)
    print(f"wrote {options.out / 'cohort.html'} and cohort.csv: {counted(len(members), 'slide')}")
    return _OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spatialdl-cohort",
        description="Describe slides: splits, patients, scanners, tissue, stains, focus; outliers.",
    )
    add = parser.add_argument
    add("slides", nargs="+", type=Path, metavar="PATH", help="slides, or folders of slides")
    add("--recursive", action="store_true", help="search these folders recursively")
    add(
        "--labels", type=Path, metavar="CSV", help="column slide or slide_id; all columns are shown"
    )
    add("--tiles", type=Path, metavar="DIR", help="data set cut from the slides")
    add(
        "--predictions",
        type=Path,
        metavar="DIR",
        help="output of python -m spatialdl.predict for the slides; wrong predictions come first",
    )
    add("--jobs", type=positive_int, default=1, metavar="N", help="worker processes (default 1)")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for cohort.html, cohort.csv")
    return parser


def _facts(options: argparse.Namespace, names: Mapping[Path, str]) -> Facts:
    """Cells of the tables for each slide, by its name."""
    facts: Facts = {name: {} for name in names.values()}
    index = slide_index(list(names))
    if options.labels is not None:
        table = read_table(options.labels)
        for row in table.rows:
            path = index.find(row[table.key], str(options.labels))
            if path is not None:
                facts[names[path]] |= {key: row[key] for key in table.columns if key != table.key}
    if options.predictions is not None:
        columns = _predicted(options.predictions)
        shown = [key for key in columns if key.startswith(_SHOWN)]
        for number, slide in enumerate(columns["slide"]):
            if slide in facts:
                facts[slide] |= {key: _rounded(columns[key][number]) for key in shown}
    return facts


def _predicted(folder: Path) -> Columns:
    path = find_predicted(folder, "slides") or folder / "slides.csv"
    columns = read_predicted(path)
    if "slide" not in columns:
        raise ValueError(f"--predictions: {path} has no column slide; give a folder of predictions")
    return columns


def _rounded(cell: str) -> str:
    try:
        return f"{float(cell):.4g}"
    except ValueError:
        return cell


def _tiles(folder: Path | None) -> Counter[str] | None:
    if folder is None:
        return None
    return Counter(sample.slide for sample in Manifest.load(folder).samples if sample.slide)


def _with_tiles(measures: SlideMeasures, tiles: Counter[str] | None) -> SlideMeasures:
    if tiles is None:
        return measures
    numbers = {**measures.numbers, "tiles": float(tiles[measures.name])}
    return replace(measures, numbers=numbers)


def _print(members: Sequence[CohortSlide]) -> None:
    odd = [member for member in members if member.remarks]
    for member in odd[:_MOST_LINES]:
        print(f"{member.measures.name}: {'; '.join(member.remarks)}")
    if len(odd) > _MOST_LINES:
        print(f"and {counted(len(odd) - _MOST_LINES, 'more slide')} with remarks")


if __name__ == "__main__":
    sys.exit(main())
