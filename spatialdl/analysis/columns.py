"""Columns of a table of slides, such as an age or a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spatialdl.data.slide_table import read_table


def read_columns(
    path: Path, slides: Sequence[str], columns: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Read values by slide and column; empty values are omitted.

    Args:
        path: CSV in UTF-8 with a column `slide` or `slide_id`: names with or without a suffix.
        slides: slide names; lines of any other slide are skipped.
        columns: names of the columns to read.

    Raises:
        ValueError: the file cannot be read, lacks a column, lists a slide twice, or lists none of
            the slides.
    """
    table = read_table(path)
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise ValueError(
            f"{path} has no column {', '.join(missing)}; columns: {', '.join(table.columns)}"
        )
    known, values = set(slides), dict[str, dict[str, str]]()
    for line, row in zip(table.lines, table.rows, strict=True):
        listed = Path(row[table.key]).name
        slide = next((name for name in (listed, Path(listed).stem) if name in known), None)
        if slide is None:
            continue
        if slide in values:
            raise ValueError(f"{path} line {line}: duplicate slide {slide!r}; keep one line")
        values[slide] = {name: row[name] for name in columns if row[name]}
    if not values:
        raise ValueError(
            f"{path} has none of the {len(slides)} slides with features, such as {slides[0]!r}"
        )
    return values


def numbers_of(path: Path, values: dict[str, dict[str, str]], column: str) -> dict[str, float]:
    """Parse the numbers of a column, by slide.

    Raises:
        ValueError: a value is not a finite number, or the column is empty.
    """
    numbers = {}
    for slide, row in values.items():
        if column not in row:
            continue
        try:
            numbers[slide] = float(row[column])
        except ValueError:
            numbers[slide] = np.nan
        if not np.isfinite(numbers[slide]):
            raise ValueError(
                f"{path}: {column} of slide {slide!r} is {row[column]!r}, expected a finite number "
                "(for classes, use --classes)"
            )
    if not numbers:
        raise ValueError(f"{path}: column {column} is empty for all slides with features")
    return numbers


def as_numbers(texts: Sequence[str]) -> npt.NDArray[np.float64] | None:
    """Parse numbers, with NaN for an empty text; None if any text is not a number."""
    try:
        return np.array([float(text) if text else np.nan for text in texts])
    except ValueError:
        return None
