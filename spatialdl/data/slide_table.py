"""CSV tables of slides, images or predictions, as text; predictions also as Parquet."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spatialdl.data.saving import save_table

SLIDE_COLUMNS = ("slide", "slide_id")
"""Names of the slide column; the second is CLAM's."""

IMAGE_COLUMNS = ("image", "image_id", "image_name", "filename", "file_name", "file")
"""Names of the column of images in a table of images, in order of precedence."""

PATIENT, SPLIT = "patient", "split"

Columns = dict[str, list[str]]


@dataclass(frozen=True)
class SlideTable:
    """Rows of a CSV as text, in file order.

    Attributes:
        columns: column names.
        rows: cells by column, without surrounding white space.
        key: the slide or image column.
        lines: line number of each row, from 1.
    """

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, str], ...]
    key: str
    lines: tuple[int, ...]

    @property
    def slides(self) -> list[str]:
        """Slide names."""
        return [row[self.key] for row in self.rows]

    def column(self, name: str) -> list[str]:
        """The cells of a column.

        Raises:
            ValueError: there is no such column.
        """
        if name not in self.columns:
            raise ValueError(f"the table has no column {name}; it has {', '.join(self.columns)}")
        return [row[name] for row in self.rows]

    def with_splits(self, splits: Sequence[str]) -> SlideTable:
        """A copy with the splits as a column."""
        columns = self.columns if SPLIT in self.columns else (*self.columns, SPLIT)
        pairs = zip(self.rows, splits, strict=True)
        rows = tuple({**row, SPLIT: split} for row, split in pairs)
        return SlideTable(columns, rows, self.key, self.lines)

    def save(self, path: Path) -> None:
        """Write the CSV atomically.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        save_table(path, self.columns, ([row[name] for name in self.columns] for row in self.rows))


class PathIndex:
    """Look-up of files by the end of their path, then by their name without suffix.

    Args:
        paths: paths of the files.
        noun: what a file is, for messages.
        addresses: returns all absolute paths of a file.
        aliases: returns all names of a file.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        noun: str,
        addresses: Callable[[Path], Sequence[Path]],
        aliases: Callable[[Path], Sequence[str]],
    ) -> None:
        self._noun = noun
        self._paths: dict[str, list[tuple[Path, Path]]] = {}
        self._names: dict[str, list[Path]] = {}
        for path in paths:
            for address in addresses(path):
                self._paths.setdefault(address.name, []).append((address, path))
            for name in aliases(path):
                self._names.setdefault(name, []).append(path)

    def find(self, name: str, where: str) -> Path | None:
        """Return the file of that name; None if there is none.

        Raises:
            ValueError: several files match.
        """
        parts = Path(name).parts
        ends = [
            path
            for address, path in self._paths.get(Path(name).name, [])
            if address.parts[-len(parts) :] == parts
        ]
        matches = list(dict.fromkeys(ends or self._names.get(name, [])))
        if len(matches) > 1:
            raise ValueError(
                f"{where}: {self._noun} {name!r} is ambiguous: {', '.join(map(str, matches))}; "
                "add its suffix, or its folder if that is not enough"
            )
        return matches[0] if matches else None


def read_cells(path: Path) -> tuple[tuple[str, ...], dict[int, list[str]]]:
    """The header of a CSV file, and its other lines by number, without empty ones.

    Raises:
        ValueError: the file is missing or malformed, or a line has more or fewer cells than the
            header; with the line.
    """
    before = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file))
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path}: it is not a UTF-8 text file: {error}") from error
    except csv.Error as error:
        raise ValueError(f"cannot read {path}: it is not a CSV file: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    finally:
        csv.field_size_limit(before)  # the limit is global in the process
    head = tuple(name.strip() for name in lines[0]) if lines else ()
    rows = {}
    for number, cells in enumerate(lines[1:], start=2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(head):
            raise ValueError(
                f"{path} line {number} has {len(cells)} cells, but the header has {len(head)}"
            )
        rows[number] = cells
    return head, rows


def read_table(
    path: Path, others: Sequence[str] = (), names: Sequence[str] = SLIDE_COLUMNS
) -> SlideTable:
    """Read a table of slides.

    Args:
        path: path of the file.
        others: other names of the slide column, allowed for the first column.
        names: names of the slide column, in order of precedence.

    Raises:
        ValueError: the file is missing or malformed, has no slide column, no rows, or a duplicate
            slide; with the line.
    """
    columns, lines = read_cells(path)
    keys = (*(name for name in columns[:1] if name in others), *names)
    key = next((name for name in keys if name in columns), None)
    if key is None:
        raise ValueError(
            f"{path} has no column {' or '.join((*names, *others))}; its header is "
            f"{','.join(columns) or 'empty'}"
        )
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise ValueError(f"{path} has two columns {twice[0]!r}; rename one of them")
    if not lines:
        raise ValueError(f"{path} has no rows below its header")
    rows: list[dict[str, str]] = []
    seen: dict[str, int] = {}
    for number, cells in lines.items():
        row = {name: cell.strip() for name, cell in zip(columns, cells, strict=True)}
        slide = row[key]
        if not slide:
            raise ValueError(f"{path} line {number}: {key} is empty")
        if slide in seen:
            raise ValueError(
                f"{path} line {number}: {key} {slide!r} is already in line {seen[slide]}; keep one"
            )
        seen[slide] = number
        rows.append(row)
    return SlideTable(columns, tuple(rows), key, tuple(lines))


def find_predicted(folder: Path, name: str) -> Path | None:
    """The file of a prediction table, or None; CSV before Parquet."""
    return next(
        (path for kind in ("csv", "parquet") if (path := folder / f"{name}.{kind}").is_file()), None
    )


def read_predicted(path: Path) -> Columns:
    """Read the columns of a prediction table as text, by name.

    Raises:
        ValueError: it cannot be read, or a line has more or fewer cells than the header.
    """
    if path.suffix == ".parquet":
        arrow = need_pyarrow()
        try:
            table = arrow.parquet.read_table(path).to_pydict()
        except (OSError, arrow.ArrowException) as error:
            raise ValueError(f"cannot read {path}: {error}") from error
        return {
            name: ["" if cell is None else str(cell) for cell in cells]
            for name, cells in table.items()
        }
    head, rows = read_cells(path)
    if not head:
        raise ValueError(f"cannot read {path}: it is empty")
    return {name: [row[k] for row in rows.values()] for k, name in enumerate(head)}


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
