"""The command that splits slides: `spatialdl-split labels.csv --folds 5 --stratify label`.

Groups of slides are assigned greedily: the largest first, each to the split where it adds least to
the chi-squared distance between the actual and the expected counts of classes in the splits
(StratifiedGroupKFold of scikit-learn uses standard deviations instead).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from math import nextafter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spatialdl.common.text import aligned, counted, positive_int
from spatialdl.data.tables import PATIENT, SPLIT, SlideTable, in_two_splits, read_table
from spatialdl.slides.batch.finding_slides import find_slides, slide_index
from spatialdl.slides.batch.tile_options import number_in
from spatialdl.slides.cohort.leaks import pairs_apart, same_slides

_OK, _FAILED, _MISUSED = 0, 1, 2
TRAIN, VAL, TEST = "train", "val", "test"


def main(argv: Sequence[str] | None = None) -> int:
    """Assign slides to splits, or check the splits of a table.

    Args:
        argv: arguments of the command; None uses those of the process.

    Returns:
        0; 1 if --check finds the same patient or slide in two splits; 2 for invalid arguments.
    """
    options = _parser().parse_args(argv)
    try:
        table = read_table(options.labels)
        alike = _alike(options, table)
        if options.check:
            return _check(options, table, alike)
        _split(options, table, alike)
        return _OK
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _MISUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spatialdl-split",
        description="Split a table of slides or images into train, val and test, by patient.",
    )
    add = parser.add_argument
    add("labels", type=Path, metavar="CSV", help="column slide, or image; one row for each")
    add("--out", type=Path, metavar="PATH", help="CSV to write; with --folds a folder")
    add(
        "--folds",
        type=_folds,
        metavar="N",
        help="write fold_0.csv to fold_N-1.csv; in each a different Nth of the slides is val",
    )
    add("--val", type=_share, metavar="F", help="fraction for val, without --folds (default 0.15)")
    add(
        "--test",
        type=_share,
        metavar="F",
        help="fraction for test (default 0.15; 0 with --folds)",
    )
    add(
        "--by",
        metavar="COLUMN",
        help="keep slides with equal values in one split (default patient, if that column "
        "exists; empty cells match no other slide)",
    )
    add(
        "--stratify",
        metavar="COLUMNS",
        help="balance each value, or combination of values of a,b, over the splits; columns with "
        "more than ten different numbers are binned into quartiles",
    )
    add("--seed", type=int, default=0, metavar="N", help="random seed (default 0)")
    add(
        "--slides",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="files and folders of the slides: keep slides with the same image in one split",
    )
    add("--recursive", action="store_true", help="search these folders recursively")
    add("--jobs", type=positive_int, default=1, metavar="N", help="threads to read and compare")
    add("--check", action="store_true", help="write nothing; check the column split for leaks")
    return parser


def _folds(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 2")
    return int(text)


_share = number_in(0.0, nextafter(1.0, 0.0), "a fraction, at least 0 and below 1")


def _alike(options: argparse.Namespace, table: SlideTable) -> list[list[int]]:
    """Groups of rows whose slides have the same image; empty without --slides."""
    if options.slides is None:
        return []
    index = slide_index(find_slides(options.slides, recursive=options.recursive))
    matches = [index.find(name, f"{options.labels}: {name}") for name in table.slides]
    missing = [name for name, path in zip(table.slides, matches, strict=True) if path is None]
    if missing:
        raise ValueError(
            f"{options.labels} names {', '.join(missing)}, not among the slides of --slides; "
            "add their folder, or remove --slides"
        )
    paths = [path for path in matches if path is not None]
    return same_slides(paths, jobs=options.jobs)


def _split(options: argparse.Namespace, table: SlideTable, alike: Sequence[Sequence[int]]) -> None:
    if options.out is None:
        raise ValueError("--out is missing: set the CSV to write, with --folds a folder")
    groups = _groups(options, table, alike)
    columns = [name.strip() for name in options.stratify.split(",")] if options.stratify else []
    strata = strata_of([table.column(name) for name in columns] or [[""] * len(table.rows)])
    for fold, splits in enumerate(_divided(options, groups, strata)):
        divided = table.with_splits(splits)
        path = options.out if options.folds is None else options.out / f"fold_{fold}.csv"
        divided.save(path)
        print(f"wrote {path}")
        print("\n".join(_table(divided, strata, groups, bool(columns))))


def _groups(
    options: argparse.Namespace, table: SlideTable, alike: Sequence[Sequence[int]]
) -> list[int]:
    by = options.by or table.patient
    reasons: list[list[str | int | None]] = [list(range(len(table.rows)))]
    if by is not None:
        reasons.append([cell or None for cell in table.column(by)])
    for group in alike:
        names = ", ".join(table.slides[number] for number in group)
        print(f"remark: {names} have the same image; keeping them in one split", file=sys.stderr)
        reasons.append([0 if number in group else None for number in range(len(table.rows))])
    groups = groups_of(reasons)
    what = f"by {by}" if by is not None else "one per slide, without --by"
    print(f"{counted(len(groups), 'slide')} in {counted(max(groups) + 1, 'group')}, {what}")
    return groups


def _divided(
    options: argparse.Namespace, groups: Sequence[int], strata: Sequence[str]
) -> list[list[str]]:
    """The split of each slide, for each fold."""
    counts = counts_of(groups, strata)
    folds: int | None = options.folds
    default = 0.15 if folds is None else 0.0
    test = default if options.test is None else options.test
    if folds is not None and options.val is not None:
        raise ValueError("--val cannot be combined with --folds: each fold has 1/N of the slides")
    if folds is None:
        val = default if options.val is None else options.val
        if val + test >= 1:
            raise ValueError(f"--val {val:g} and --test {test:g} leave no slides for train")
        shares = {TRAIN: 1 - val - test, VAL: val, TEST: test}
        wanted = {name: share for name, share in shares.items() if share > 0}
        parts = assign(counts, list(wanted.values()), options.seed)
        return [[list(wanted)[parts[group]] for group in groups]]
    shares_of_folds = [(1 - test) / folds] * folds + ([test] if test else [])
    parts = assign(counts, shares_of_folds, options.seed)
    return [[_name_in_fold(parts[group], fold, folds) for group in groups] for fold in range(folds)]


def _name_in_fold(part: int, fold: int, folds: int) -> str:
    if part == folds:
        return TEST
    return VAL if part == fold else TRAIN


def _table(
    table: SlideTable, strata: Sequence[str], groups: Sequence[int], stratified: bool
) -> list[str]:
    """Lines of a table: slides, groups and classes of each split."""
    splits = table.column(SPLIT)
    classes = sorted(set(strata)) if stratified else []
    rows = [("", "slides", "groups", *(name or "(empty)" for name in classes))]
    for split in [name for name in (TRAIN, VAL, TEST) if name in splits]:
        inside = [number for number, name in enumerate(splits) if name == split]
        kinds = Counter(strata[number] for number in inside)
        unique = len({groups[number] for number in inside})
        rows.append((split, *map(str, (len(inside), unique, *(kinds[name] for name in classes)))))
    return ["  " + line for line in aligned(rows)]


def _check(options: argparse.Namespace, table: SlideTable, alike: Sequence[Sequence[int]]) -> int:
    splits = table.column(SPLIT)
    by = options.by or table.patient
    leaks = []
    if by is not None:
        divided = in_two_splits(table.column(by), splits)
        leaks += [f"{by} {label} is in {' and '.join(where)}" for label, where in divided.items()]
    for pair in pairs_apart(alike, splits):
        first, second = (f"{table.slides[k]} ({splits[k]})" for k in pair)
        leaks.append(f"{first} and {second} have the same image")
    for line in leaks:
        print(f"leak: {line}")
    checked = [f"the column {by}"] * (by is not None)
    checked += ["the slides"] * (options.slides is not None)
    if not checked:
        raise ValueError(f"{options.labels} has no column {PATIENT}: set --by or --slides to check")
    print(f"{counted(len(leaks), 'leak')} found in {' and '.join(checked)}")
    return _FAILED if leaks else _OK


_BINS, _MOST_CLASSES = 4, 10

Counts = npt.NDArray[np.float64]


def assign(counts: Counts, shares: Sequence[float], seed: int) -> list[int]:
    """Assign each group to a split.

    Args:
        counts: (groups, classes), slides of each class in a group.
        shares: target fraction of all slides for each split; above 0, sum 1.
        seed: of the order of groups of equal size.

    Returns:
        The index of the split of each group.

    Raises:
        ValueError: there are fewer groups than splits.
    """
    if len(counts) < len(shares):
        raise ValueError(f"{len(counts)} groups cannot be divided over {len(shares)} splits")
    # an additional class of all slides, so that sizes of splits match their shares
    wide = np.column_stack([counts, counts.sum(1)])
    expected = np.outer(shares, wide.sum(0))
    expected[expected == 0] = 1.0  # classes without slides
    order = np.random.default_rng(seed).permutation(len(counts))
    order = order[np.argsort(-wide[order, -1], kind="stable")]
    missing, assigned = -expected.copy(), [0] * len(counts)
    empty = set(range(len(shares)))
    for place, group in enumerate(order):
        added = ((2 * missing + wide[group]) * wide[group] / expected).sum(1)
        if len(order) - place <= len(empty):  # each remaining group must fill an empty split
            added[[split for split in range(len(shares)) if split not in empty]] = np.inf
        split = int(np.argmin(added))
        missing[split] += wide[group]
        empty.discard(split)
        assigned[int(group)] = split
    return assigned


def groups_of(labels: Sequence[Sequence[Hashable | None]]) -> list[int]:
    """Number the groups of slides that must stay together, in the order of their first slides.

    Args:
        labels: for each criterion one label per slide; slides with equal labels are in one group,
            None matches no other slide.
    """
    count = len(labels[0])
    parent = list(range(count))

    def root(slide: int) -> int:
        while parent[slide] != slide:
            parent[slide] = parent[parent[slide]]
            slide = parent[slide]
        return slide

    for criterion in labels:
        first: dict[Hashable, int] = {}
        for slide, label in enumerate(criterion):
            if label is not None:
                roots = root(first.setdefault(label, slide)), root(slide)
                parent[max(roots)] = min(roots)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(slide), len(numbers)) for slide in range(count)]


def strata_of(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the class of each slide for stratification.

    Args:
        columns: cells of one or several columns; a class is a combination of cells. Columns with
            more than ten different numbers are binned into quartiles.
    """
    binned = [_binned(column) for column in columns]
    return [" ".join(cells) for cells in zip(*binned, strict=True)]


def _binned(column: Sequence[str]) -> list[str]:
    if len(set(column)) <= _MOST_CLASSES:
        return list(column)
    try:
        numbers = np.array([float(cell or "nan") for cell in column])
    except ValueError:
        return list(column)
    known = numbers[np.isfinite(numbers)]
    if not known.size:
        return list(column)
    edges = np.quantile(known, np.linspace(0, 1, _BINS + 1)[1:-1])
    names = [f"quarter {k + 1}" for k in range(_BINS)]
    bins = np.searchsorted(edges, numbers, side="right")
    return [
        names[k] if np.isfinite(number) else "" for k, number in zip(bins, numbers, strict=True)
    ]


def counts_of(groups: Sequence[int], strata: Sequence[str]) -> Counts:
    """Count the slides of each class in each group: (groups, classes)."""
    classes = {name: k for k, name in enumerate(sorted(set(strata)))}
    counts = np.zeros((max(groups) + 1, len(classes)))
    for group, name in zip(groups, strata, strict=True):
        counts[group, classes[name]] += 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
