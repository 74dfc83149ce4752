"""A column of a table of slides, such as an age or a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spatialdl.data.slide_table import read_table


def read_columns(
    path: Path, slides: Sequence[str], columns: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Of each slide that has a line its values by column; an empty one is left out.

    Args:
        path: CSV in UTF-8 with a column `slide` or `slide_id`: names with or without a suffix.
        slides: names; lines of others are passed over.
        columns: that are wanted.

    Raises:
        ValueError: the file cannot be read, has no such column, names a slide twice, or names none
            of the slides.
    """
    table = read_table(path)
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise ValueError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(table.columns)}"
        )
    known, found = set(slides), dict[str, dict[str, str]]()
    for line, row in zip(table.lines, table.rows, strict=True):
        named = Path(row[table.key]).name
        slide = next((name for name in (named, Path(named).stem) if name in known), None)
        if slide is None:
            continue
        if slide in found:
            raise ValueError(f"{path} line {line}: slide {slide!r} was named before; keep one line")
        found[slide] = {name: row[name] for name in columns if row[name]}
    if not found:
        raise ValueError(
            f"{path} names none of the {len(slides)} slides with features, such as {slides[0]!r}"
        )
    return found


def numbers_of(path: Path, values: dict[str, dict[str, str]], column: str) -> dict[str, float]:
    """The numbers of a column by slide.

    Raises:
        ValueError: a value is no finite number, or there is none.
    """
    found = {}
    for slide, row in values.items():
        if column not in row:
            continue
        try:
            found[slide] = float(row[column])
        except ValueError:
            found[slide] = np.nan
        if not np.isfinite(found[slide]):
            raise ValueError(
                f"{path}: {column} of slide {slide!r} is {row[column]!r}, expected a number "
                "(of classes, give --classes)"
            )
    if not found:
        raise ValueError(f"{path}: column {column} is empty for all slides with features")
    return found


def as_numbers(texts: Sequence[str]) -> npt.NDArray[np.float64] | None:
    """Texts as numbers, an empty one as NaN; None if one is another text."""
    try:
        return np.array([float(text) if text else np.nan for text in texts])
    except ValueError:
        return None
