"""Tables of slides, images or samples: CSV, Excel or Parquet, with the same columns everywhere.

::

    slide_id,label,split,patient          slide,oestrogen,progesterone          sample,age
    a,tumour,train,p1                     a.svs,1,0                             0,63.5
    b,normal,val,p2                       b.svs,1,                              1,71

``slide``, ``slide_id``, or one of `IMAGE_COLUMNS` names a slide or image, with or without its
suffix and folders. ``patient_id`` and ``case_id`` also name the patient. Cells of CSV are separated
by commas, semicolons or tabs, in UTF-8 or UTF-16. All cells are text.
"""

from __future__ import annotations

import codecs
import csv
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from spatialdl.common.files import save_table, storable, volume_name
from spatialdl.common.packages import needed

SLIDE_COLUMNS = ("slide", "slide_id")
"""Names of the slide column; the second is CLAM's."""

IMAGE_COLUMNS = ("image", "image_id", "image_name", "filename", "file_name", "file")
"""Names of the column of images in a table of images, in order of precedence."""

NAME_COLUMNS = (*SLIDE_COLUMNS, *IMAGE_COLUMNS)
"""Names of the column that names the slide or image of a row, in order of precedence."""

LABEL, SPLIT, PATIENT, SAMPLE = "label", "split", "patient", "sample"

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Split of each name in a table, and of each folder name above classes, in lower case."""

_PATIENTS = (PATIENT, "patient_id", "case_id")
_NO_LABELS = {*NAME_COLUMNS, *_PATIENTS, SPLIT, SAMPLE, "mpp"}  # columns that are never labels
_BYTE_ORDERS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Columns = dict[str, list[str]]


@dataclass(frozen=True)
class TableRow:
    """A row of a slide, image or sample.

    Attributes:
        name: its name.
        cells: cells by column, without surrounding white space.
        where: file and line, for messages.
        labels: cells of the label columns of `read_labels`.
        split: None if there is no such column.
        patient: None if unknown.
    """

    name: str
    cells: Mapping[str, str]
    where: str
    labels: tuple[str, ...] = ()
    split: str | None = None
    patient: str | None = None

    def usual_split(self) -> str:
        """The split as train, val or test.

        Raises:
            ValueError: it is none of them.
        """
        split = SPLITS.get((self.split or "").lower())
        if split is None:
            raise ValueError(f"{self.where}: split is {self.split!r}, expected train, val or test")
        return split


@dataclass(frozen=True)
class SlideTable:
    """A table with a row for each slide, image or sample, in file order.

    Attributes:
        path: path of the file.
        key: the column of names.
        columns: column names.
        rows: the rows.
        labels: label columns of `read_labels`.
    """

    path: Path
    key: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    labels: tuple[str, ...] = ()

    @property
    def slides(self) -> list[str]:
        """Names of all rows."""
        return [row.name for row in self.rows]

    @property
    def patient(self) -> str | None:
        """The column of patients, if there is one."""
        return next((name for name in _PATIENTS if name in self.columns), None)

    def column(self, name: str) -> list[str]:
        """The cells of a column.

        Raises:
            ValueError: there is no such column.
        """
        self.check_columns([name])
        return [row.cells[name] for row in self.rows]

    def check_columns(self, names: Sequence[str], remedy: str = "") -> None:
        """Check that there are these columns.

        Raises:
            ValueError: one is missing.
        """
        missing = [name for name in names if name not in self.columns]
        if missing:
            raise ValueError(
                f"{self.path} has no column {', '.join(missing)}; its columns are "
                f"{', '.join(self.columns)}{remedy}"
            )

    def check_patients(self, remedy: str = "") -> None:
        """Check that no patient is in two splits, which would bias the evaluation.

        Raises:
            ValueError: a patient is.
        """
        splits = [row.split or "" for row in self.rows]
        for patient, where in in_two_splits([row.patient for row in self.rows], splits).items():
            raise ValueError(
                f"{self.path}: patient {patient} is in {' and '.join(where)}, which invalidates "
                f"the evaluation: keep each patient in one split (spatialdl-split --by patient)"
                f"{remedy}"
            )

    def match(self, names: Sequence[str]) -> tuple[dict[str, TableRow], list[str]]:
        """The rows of slides by these names, and the names of rows that match none.

        A table may contain names with suffix and folders.

        Raises:
            ValueError: two rows match the same slide.
        """
        known, unknown = set(names), list[str]()
        found: dict[str, TableRow] = {}
        for row in self.rows:
            name = next((one for one in _spellings(row.name) if one in known), None)
            if name is None:
                unknown.append(row.name)
            elif name in found:
                raise ValueError(
                    f"{row.where}: {found[name].name!r} and {row.name!r} both match slide "
                    f"{name!r}: keep one, or use its exact name"
                )
            else:
                found[name] = row
        return found, unknown

    def with_splits(self, splits: Sequence[str]) -> SlideTable:
        """A copy with the splits as a column."""
        columns = self.columns if SPLIT in self.columns else (*self.columns, SPLIT)
        rows = tuple(
            TableRow(row.name, {**row.cells, SPLIT: split}, row.where, split=split)
            for row, split in zip(self.rows, splits, strict=True)
        )
        return SlideTable(self.path, self.key, columns, rows)

    def save(self, path: Path) -> None:
        """Write a CSV atomically.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        cells = ([row.cells[name] for name in self.columns] for row in self.rows)
        save_table(path, self.columns, cells)


def read_table(
    path: Path,
    names: Sequence[str] = NAME_COLUMNS,
    *,
    required: Sequence[str] = (),
    first: Sequence[str] = (),
) -> SlideTable:
    """Read a table of slides, images or samples.

    Args:
        path: path of the file.
        names: names of the column of names, in order of precedence.
        required: columns that it must have.
        first: other names of the column of names, if it is the first column.

    Raises:
        ValueError: the file is missing or malformed, lacks a column, has no rows, or a duplicate
            name; with the line.
    """
    columns, lines = read_cells(path)
    keys = (*(name for name in columns[:1] if name in first), *names)
    key = next((name for name in keys if name in columns), None)
    if key is None:
        raise ValueError(
            f"{path} has no column {' or '.join((*names, *first))}; its columns are "
            f"{', '.join(columns) or 'none: it is empty'}"
        )
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise ValueError(f"{path} has two columns {twice[0]!r}; rename one of them")
    SlideTable(path, key, columns, ()).check_columns(required)
    if not lines:
        raise ValueError(f"{path} has no rows below its header")
    patient = next((name for name in _PATIENTS if name in columns), "")
    rows: dict[str, TableRow] = {}
    for number, texts in lines.items():
        cells, where = dict(zip(columns, texts, strict=True)), f"{path} line {number}"
        name = cells[key]
        if not name:
            raise ValueError(f"{where}: {key} is empty")
        if name in rows:
            raise ValueError(f"{where}: {key} {name!r} is already in {rows[name].where}; keep one")
        rows[name] = TableRow(
            name, cells, where, split=cells.get(SPLIT), patient=cells.get(patient) or None
        )
    return SlideTable(path, key, columns, tuple(rows.values()))


def read_labels(
    path: Path,
    columns: Sequence[str] | None,
    names: Sequence[str] = NAME_COLUMNS,
    setting: str = "data.columns=[...]",
) -> SlideTable:
    """Read a table of labels.

    Args:
        path: path of the file.
        columns: label columns; None takes all columns without another meaning.
        names: see `read_table`.
        setting: the setting that chooses label columns, for messages.

    Raises:
        ValueError: see `read_table`; a column is missing, a split cell is empty, or a patient is
            in several splits.
    """
    table = read_table(path, names)
    if columns is None:
        columns = [name for name in table.columns if name not in {*_NO_LABELS, table.key}]
    table.check_columns(columns or [LABEL], f": set label columns with {setting}")
    rows = []
    for row in table.rows:
        if row.split == "":
            raise ValueError(f"{row.where}: {SPLIT} is empty")
        labels = tuple(row.cells[name] for name in columns)
        rows.append(replace(row, labels=labels))
    table = replace(table, rows=tuple(rows), labels=tuple(columns))
    table.check_patients()
    return table


def label_slides(
    slides: Sequence[str], path: Path | None, *, empty: bool = False
) -> dict[str, TableRow]:
    """Rows of all slides in a table with a column label; none without a table.

    Args:
        empty: accept empty labels, for their splits.

    Raises:
        ValueError: see `read_labels`; or a slide has no row, or an empty label.
    """
    if path is None:
        return {}
    rows, _ = read_labels(path, [LABEL], setting="a header label").match(slides)
    for slide in slides:
        if slide not in rows:
            raise ValueError(
                f"{path} has no label of slide {slide}; add a line, or remove the slide"
            )
        if not (rows[slide].labels[0] or empty):
            raise ValueError(f"{rows[slide].where}: label is empty")
    return rows


def in_two_splits(labels: Sequence[object], splits: Sequence[str]) -> dict[str, list[str]]:
    """The labels in more than one split, with these splits; ignores None and ""."""
    seen: dict[str, dict[str, None]] = {}
    for label, split in zip(labels, splits, strict=True):
        if label:
            seen.setdefault(str(label), {})[split] = None
    return {label: list(where) for label, where in seen.items() if len(where) > 1}


def _spellings(given: str) -> list[str]:
    """Names of a slide in data sets and predictions, by its name in a table."""
    path = PurePath(given)
    stem = path.stem if path.stem.strip(".") else path.name
    tails = ["_".join(path.parts[-depth:]).lstrip("/") for depth in range(2, len(path.parts) + 1)]
    names = (given, path.name, stem, *tails, volume_name(Path(given)))
    return [storable(name) for name in names if name]


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
    head, lines = read_cells(path, ours=True)
    if not head:
        raise ValueError(f"cannot read {path}: it is empty")
    return {name: [cells[k] for cells in lines.values()] for k, name in enumerate(head)}


def read_cells(path: Path, *, ours: bool = False) -> tuple[tuple[str, ...], dict[int, list[str]]]:
    """The header of a table, and its other lines by number, without empty ones.

    Args:
        path: a file `.xlsx`, of which the first sheet is read, `.parquet`, or text.
        ours: whether spatialdl wrote it: separated by commas, and white space around cells is kept.

    Raises:
        ValueError: the file is missing or malformed, a package is missing, or a line has more or
            fewer cells than the header; with the line.
    """
    kinds: dict[str, Callable[[Path], list[list[str]]]]
    kinds = {".xlsx": _excel_lines, ".parquet": _parquet_lines}
    as_text = partial(_text_lines, delimiters="," if ours else ",;\t")
    try:
        head, *lines = kinds.get(path.suffix.lower(), as_text)(path) or [[]]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # readers raise arbitrary errors for damaged files
        raise ValueError(f"cannot read {path}: {error}") from error
    rows = {}
    for number, cells in enumerate(lines, start=2):
        texts = [cell.strip() for cell in cells]
        if not any(texts):
            continue
        if len(texts) != len(head):
            raise ValueError(
                f"{path} line {number} has {len(texts)} cells, but the header has {len(head)}"
            )
        rows[number] = cells if ours else texts
    return tuple(name.strip() for name in head), rows


def _text_lines(path: Path, delimiters: str) -> list[list[str]]:
    content = path.read_bytes()
    try:
        text = content.decode("utf-16" if content.startswith(_BYTE_ORDERS) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"it is not a UTF-8 text file: {error}; save it as CSV UTF-8, or as .xlsx"
        ) from error

    def parse(part: str, delimiter: str) -> list[list[str]]:
        return list(csv.reader(io.StringIO(part, newline=""), delimiter=delimiter))

    before = csv.field_size_limit(sys.maxsize)
    try:
        head = text.partition("\n")[0]
        return parse(text, max(delimiters, key=lambda one: len((parse(head, one) or [[]])[0])))
    except csv.Error as error:
        raise ValueError(f"it is not a CSV file: {error}") from error
    finally:
        csv.field_size_limit(before)  # the limit is global in the process


def _parquet_lines(path: Path) -> list[list[str]]:
    table = needed("pyarrow.parquet", "parquet").read_table(path)
    columns = (map(_text, column.to_pylist()) for column in table.columns)
    return [table.column_names, *map(list, zip(*columns, strict=True))]


def _excel_lines(path: Path) -> list[list[str]]:
    book = needed("openpyxl", "excel").load_workbook(path, read_only=True, data_only=True)
    try:
        lines = [[_text(cell) for cell in row] for row in book.worksheets[0].values]
    finally:
        book.close()
    # cells that were emptied, or only formatted, extend a sheet
    width = max((k + 1 for line in lines for k, cell in enumerate(line) if cell), default=0)
    return [[*line, *[""] * width][:width] for line in lines]


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell)
