"""The slide table of a training run on bags: labels, splits and patients.

::

    slide_id,label,split,patient          slide,oestrogen,progesterone
    a,tumour,train,p1                     a.svs,1,0
    b,normal,val,p2                       b.svs,1,

``slide`` or ``slide_id`` names a slide, with or without its suffix. Label columns are configured,
or default to all columns without another meaning. ``patient_id`` and ``case_id`` also name the
patient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spatialdl.data.slide_table import PATIENT, SLIDE_COLUMNS, SPLIT, read_table

PATIENTS = (PATIENT, "patient_id", "case_id")
"""Names of the patient column."""

_OTHER = ("mpp", "sample")  # columns of other slide tables, never labels


@dataclass(frozen=True)
class SlideRow:
    """A table row of a slide.

    Attributes:
        cells: label cells, as text.
        where: file and line, for messages.
    """

    cells: tuple[str, ...]
    split: str | None
    patient: str | None
    where: str


@dataclass(frozen=True)
class BagLabels:
    """A table of slides.

    Attributes:
        path: path of the file.
        columns: label columns.
        rows: rows by slide name in the table.
        has_split: whether there is a split column.
    """

    path: Path
    columns: tuple[str, ...]
    rows: Mapping[str, SlideRow]
    has_split: bool

    def match(self, slides: Sequence[str]) -> tuple[dict[str, SlideRow], list[str]]:
        """Match rows to slides: rows by slide, and table names that are not among the slides.

        Raises:
            ValueError: two rows match one slide.
        """
        known, found, missing = set(slides), dict[str, SlideRow](), []
        for name, row in self.rows.items():
            slide = name if name in known else Path(name).stem
            if slide not in known:
                missing.append(name)
            elif slide in found:
                raise ValueError(
                    f"{row.where}: {name} matches the slide {slide}, which also has "
                    f"{found[slide].where}; keep one"
                )
            else:
                found[slide] = row
        return found, missing


def read_bag_labels(
    path: Path,
    columns: Sequence[str] | None,
    names: Sequence[str] = SLIDE_COLUMNS,
    setting: str = "data.columns=[...]",
) -> BagLabels:
    """Read a CSV of slides, or of images.

    Args:
        path: path of the file.
        columns: label columns; None takes all columns without another meaning.
        names: names of the slide column, in order of precedence.
        setting: the setting that chooses label columns, for messages.

    Raises:
        ValueError: the file is missing or malformed, a column is missing, a slide or split cell is
            empty, or a patient is in several splits.
    """
    table = read_table(path, names=names)
    patient = next((name for name in PATIENTS if name in table.columns), None)
    chosen = _label_columns(path, table.columns, columns, setting)
    rows: dict[str, SlideRow] = {}
    for line, row in zip(table.lines, table.rows, strict=True):
        where = f"{path} line {line}"
        if row.get(SPLIT) == "":
            raise ValueError(f"{where}: {SPLIT} is empty")
        rows[row[table.key]] = SlideRow(
            tuple(row[name] for name in chosen),
            row.get(SPLIT),
            None if patient is None else row[patient] or None,
            where,
        )
    _check_patients(rows)
    return BagLabels(path, tuple(chosen), rows, SPLIT in table.columns)


def label_slides(
    slides: Sequence[str], path: Path | None, *, empty: bool = False
) -> dict[str, SlideRow]:
    """Rows of all slides in a table with a column label; none without a table.

    Args:
        empty: accept empty labels, for their splits.

    Raises:
        ValueError: see `read_bag_labels`; or a slide has no row, or an empty label.
    """
    if path is None:
        return {}
    rows, _ = read_bag_labels(path, ["label"], setting="a header label").match(slides)
    for slide in slides:
        if slide not in rows:
            raise ValueError(
                f"{path} has no label of slide {slide}; add a line, or remove the slide"
            )
        if not (rows[slide].cells[0] or empty):
            raise ValueError(f"{rows[slide].where}: label is empty")
    return rows


def _label_columns(
    path: Path, head: Sequence[str], columns: Sequence[str] | None, setting: str
) -> Sequence[str]:
    reserved = {*SLIDE_COLUMNS, SPLIT, *PATIENTS, *_OTHER}
    if columns is None:
        columns = [name for name in head if name not in reserved]
    missing = [name for name in columns if name not in head]
    if missing or not columns:
        what = f"no column {', '.join(missing)}" if missing else "no label column"
        raise ValueError(
            f"{path} has {what}; its columns are {', '.join(head)}: set label columns with "
            f"{setting}"
        )
    return columns


def _check_patients(rows: Mapping[str, SlideRow]) -> None:
    """Check that no patient is in two splits, which would bias the validation."""
    splits: dict[str, SlideRow] = {}
    for row in rows.values():
        if row.patient is None or row.split is None:
            continue
        before = splits.setdefault(row.patient, row)
        if before.split != row.split:
            raise ValueError(
                f"{row.where}: patient {row.patient} is in the split {row.split}, and in "
                f"{before.split} at {before.where}: keep each patient in one split"
            )
