"""Targets of a data set from a table beside it: several classes or values per image.

A row applies to all samples of a slide, or to one sample, numbered as in the manifest from 0. Empty
cells are unknown targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spatialdl.data.shards import ShardDataset
from spatialdl.data.tables import NAME_COLUMNS, SAMPLE, SlideTable, read_labels

_UNKNOWN = ("", "nan", "na", "none")
"""Cells of unknown targets, in lower case."""


def read_targets(file: Path, *, binary: bool) -> tuple[SlideTable, dict[str, list[float]]]:
    """Read a table of targets.

    Args:
        binary: whether every target is 0 or 1, and -1 means unknown.

    Returns:
        The table, with names of targets as labels; and targets by name of the row, NaN where
        unknown.

    Raises:
        ValueError: the file is missing or malformed, with the line.
    """
    table = read_labels(file, None, (SAMPLE, *NAME_COLUMNS), "their names in the header")
    if not all(table.labels):
        raise ValueError(f"{file} has a column without a name, but every target needs one")
    found = {
        row.name: [
            target_of(cell, f"{row.where}, {name}", binary)
            for cell, name in zip(row.labels, table.labels, strict=True)
        ]
        for row in table.rows
    }
    return table, found


def target_of(cell: str, where: str, binary: bool) -> float:
    """Parse the target in a cell, NaN if unknown.

    Raises:
        ValueError: not a number, or a binary target not 0, 1 or -1; begins with `where`.
    """
    if cell.lower() in _UNKNOWN:
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        raise ValueError(
            f"{where}: {cell!r} is not a number; leave unknown targets empty"
        ) from None
    if binary and value == -1:
        return math.nan
    if binary and value not in (0, 1):
        raise ValueError(f"{where}: {cell} must be 1 (present), 0 (absent), or empty")
    if not math.isfinite(value):
        raise ValueError(f"{where}: {cell} is not finite; leave unknown targets empty")
    return value


def set_targets(file: Path, sources: Sequence[ShardDataset], path: Path, binary: bool) -> list[str]:
    """Replace the labels of the splits of a data set by the targets of a table.

    Args:
        sources: splits of the data set in the folder `path`.
        binary: as for `read_targets`.

    Returns:
        The names of the targets.

    Raises:
        ValueError: the table does not match the data set: samples are missing in it, or all of
            their targets are unknown.
    """
    table, found = read_targets(file, binary=binary)
    by_sample = table.key == SAMPLE
    what, samples = "sample" if by_sample else "slide", len(sources[0].manifest.samples)
    for name in found if by_sample else ():
        if not (name.isdecimal() and int(name) < samples and name == str(int(name))):
            raise ValueError(f"{file}: no sample {name}, expected 0 to {samples - 1}")
    for source in sources:
        known = [str(number) for number in source.numbers]
        if not by_sample:
            known = [source.sample(number).slide for number in range(len(source))]
        rows, _ = table.match(known)
        without = [name for name in dict.fromkeys(known) if name not in rows]
        if without:
            raise ValueError(
                f"{file} has no line for {len(without)} of the {what}s of {path}, such as {what} "
                f"{without[0]!r}; it has {len(found)}, such as {next(iter(found))!r}"
            )
        targets = np.array([found[rows[name].name] for name in known], np.float64)
        if np.isnan(targets).all():
            raise ValueError(f"{file} has only empty targets for {path}: nothing to learn")
        source.labels = targets  # type: ignore[assignment]
    return list(table.labels)


def sample_numbers(source: ShardDataset) -> list[int]:
    """Indices of a split's samples in the whole data set."""
    return source.numbers.tolist()  # type: ignore[no-any-return]
