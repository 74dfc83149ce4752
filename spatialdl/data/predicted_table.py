"""Prediction tables in a directory, CSV or Parquet, as columns of text."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

Columns = dict[str, list[str]]


def find_predicted(folder: Path, name: str) -> Path | None:
    """The file of a prediction table, or None; CSV before Parquet."""
    return next(
        (path for kind in ("csv", "parquet") if (path := folder / f"{name}.{kind}").is_file()), None
    )


def read_predicted(path: Path) -> Columns:
    """Read the columns of a table as text, by name.

    Raises:
        ValueError: it cannot be read, or a line has more or fewer cells than the header.
    """
    if path.suffix == ".parquet":
        arrow = need_pyarrow()
        try:
            table = arrow.parquet.read_table(path).to_pydict()
        except (OSError, arrow.ArrowException) as error:
            raise ValueError(f"cannot read {path} as a prediction table: {error}") from error
        return {
            name: ["" if cell is None else str(cell) for cell in cells]
            for name, cells in table.items()
        }
    before = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head, *rows = csv.reader(file)
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise ValueError(f"cannot read {path} as a prediction table: {error}") from error
    finally:
        csv.field_size_limit(before)  # the limit is global in the process
    for number, row in enumerate(rows, start=2):
        if len(row) != len(head):
            raise ValueError(
                f"{path} line {number} has {len(row)} cells, but the header has {len(head)}"
            )
    return {name: [row[k] for row in rows] for k, name in enumerate(head)}


def need_pyarrow() -> Any:
    """Import pyarrow.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            "table=parquet requires pyarrow: pip install 'spatialdl[parquet]', or set table=csv"
        ) from None
    return pyarrow
