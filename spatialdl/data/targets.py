"""Targets of a data set from a CSV beside it: several classes or values per image.

::

    slide,oestrogen,progesterone          sample,age
    a.svs,1,0                             0,63.5
    b.svs,1,                              1,71

A row applies to all samples of a slide, or to one sample, numbered as in the manifest from 0. Empty
cells are unknown targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spatialdl.data.shards import ShardDataset
from spatialdl.data.slide_table import read_table

Targets = npt.NDArray[np.float64]

_KEYS = ("sample", "slide")
UNKNOWN_TARGETS = ("", "nan", "na", "none")
"""Cells of unknown targets, in lower case."""


def read_targets(file: Path, *, binary: bool) -> tuple[str, list[str], dict[str, list[float]]]:
    """Read a CSV of targets.

    Args:
        binary: whether every target is 0 or 1, and -1 means unknown.

    Returns:
        "sample" or "slide", the names of the targets, and the targets by sample or slide, NaN where
        unknown.

    Raises:
        ValueError: the file is missing or malformed, with the line.
    """
    table = read_table(file, names=_KEYS)
    names = [name for name in table.columns if name != table.key]
    if not names or not all(names):
        raise ValueError(
            f"{file} has the header {','.join(table.columns)}: every target needs a column with a "
            f"name beside {table.key}"
        )
    found = {
        row[table.key]: [
            target_of(row[name], f"{file} line {line}, {name}", binary) for name in names
        ]
        for line, row in zip(table.lines, table.rows, strict=True)
    }
    return table.key, names, found


def target_of(cell: str, where: str, binary: bool) -> float:
    """Parse the target in a cell, NaN if unknown.

    Raises:
        ValueError: not a number, or a binary target not 0, 1 or -1; begins with `where`.
    """
    if cell.lower() in UNKNOWN_TARGETS:
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


def match_targets(
    file: Path, key: str, found: dict[str, list[float]], samples: Sequence[str], what: str
) -> Targets:
    """Targets of samples, float64 (N, targets).

    Args:
        samples: the number or slide of each, as in the CSV.
        what: description of the samples in messages.

    Raises:
        ValueError: samples are missing in the file, or all targets are unknown.
    """
    without = [name for name in dict.fromkeys(samples) if name not in found]
    if without:
        raise ValueError(
            f"{file} has no line for {len(without)} of the {key}s of {what}, such as {key} "
            f"{without[0]!r}; it has {len(found)}, such as {next(iter(found), 'none')!r}"
        )
    targets = np.array([found[name] for name in samples], np.float64)
    if np.isnan(targets).all():
        raise ValueError(f"{file} has only empty targets for {what}: nothing to learn")
    return targets


def set_targets(file: Path, sources: Sequence[ShardDataset], path: Path, binary: bool) -> list[str]:
    """Replace the labels of the splits of a data set by the targets of a CSV.

    Args:
        sources: splits of the data set in the folder `path`.
        binary: as for `read_targets`.

    Returns:
        The names of the targets.

    Raises:
        ValueError: the CSV does not match the data set.
    """
    key, names, found = read_targets(file, binary=binary)
    if key == "sample":
        _check_numbers(file, found, len(ShardDataset(path)))
    for source in sources:
        if key == "slide":
            known = [source.sample(number).slide for number in range(len(source))]
        else:
            known = [str(number) for number in sample_numbers(source)]
        targets = match_targets(file, key, found, known, str(path))
        source.labels = targets  # type: ignore[assignment]
    return names


def _check_numbers(file: Path, found: Iterable[str], samples: int) -> None:
    for name in found:
        if not (name.isdecimal() and int(name) < samples and name == str(int(name))):
            raise ValueError(f"{file}: no sample {name}, expected 0 to {samples - 1}")


def sample_numbers(source: ShardDataset) -> list[int]:
    """Indices of a split's samples in the whole data set."""
    return source.numbers.tolist()  # type: ignore[no-any-return]
