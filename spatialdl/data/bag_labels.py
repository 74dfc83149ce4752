"""The table of slides of a training run on bags: their labels, splits and patients.

::

    slide_id,label,split,patient          slide,oestrogen,progesterone
    a,tumour,train,p1                     a.svs,1,0
    b,normal,val,p2                       b.svs,1,

``slide`` or ``slide_id`` names a slide, with or without its suffix; the columns of labels are
chosen, or all that have no other meaning. ``patient`` may be ``patient_id`` or ``case_id``, too.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SLIDE, SPLIT, PATIENT = ("slide_id", "slide"), ("split",), ("patient", "patient_id", "case_id")
_OTHER = ("mpp", "sample")  # of other tables of slides, never labels


@dataclass(frozen=True)
class SlideRow:
    """What the table has of a slide.

    Attributes:
        cells: of the columns of labels, as text.
        where: file and line, for messages.
    """

    cells: tuple[str, ...]
    split: str | None
    patient: str | None
    where: str


@dataclass(frozen=True)
class SlideTable:
    """A table of slides.

    Attributes:
        path: of the file.
        columns: of labels.
        rows: by slide, as the table names it.
        has_split: whether there is a column for it.
    """

    path: Path
    columns: tuple[str, ...]
    rows: Mapping[str, SlideRow]
    has_split: bool

    def match(self, slides: Sequence[str]) -> tuple[dict[str, SlideRow], list[str]]:
        """The rows of slides, and the names in the table of slides that are not among them.

        Raises:
            ValueError: two rows are of one slide.
        """
        known, found, missing = set(slides), dict[str, SlideRow](), []
        for name, row in self.rows.items():
            slide = name if name in known else Path(name).stem
            if slide not in known:
                missing.append(name)
            elif slide in found:
                raise ValueError(
                    f"{row.where}: {name} is the slide {slide}, which has another row "
                    f"({found[slide].where}); keep one"
                )
            else:
                found[slide] = row
        return found, missing


def read_slide_table(path: Path, columns: Sequence[str] | None) -> SlideTable:
    """Read a CSV of slides.

    Args:
        path: of the file.
        columns: of labels; None takes all columns that have no other meaning.

    Raises:
        ValueError: the file is missing or malformed, a column is missing, a cell of the slide or
            the split is empty, or a patient is in several splits.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"data.labels={path} cannot be read: {error}") from error
    head = [name.strip() for name in lines[0]] if lines else []
    if len(set(head)) < len(head) or not any(name in SLIDE for name in head):
        raise ValueError(
            f"{path} begins with {','.join(head) or 'nothing'}: its first line names each column "
            f"once, {' or '.join(SLIDE)} among them"
        )
    slide, split, patient = (_place(head, names) for names in (SLIDE, SPLIT, PATIENT))
    places = _label_places(path, head, columns)
    rows: dict[str, SlideRow] = {}
    for number, line in enumerate(lines[1:], start=2):
        cells = [cell.strip() for cell in line]
        if not any(cells):
            continue
        where = f"{path} line {number}"
        if len(cells) != len(head):
            raise ValueError(f"{where} has {len(cells)} cells, but the first line {len(head)}")
        for place in (slide, split):
            if place is not None and not cells[place]:
                raise ValueError(f"{where}: {head[place]} is empty")
        name = cells[slide or 0]
        row = SlideRow(
            tuple(cells[place] for place in places),
            None if split is None else cells[split],
            None if patient is None else cells[patient] or None,
            where,
        )
        if name in rows:
            raise ValueError(f"{where}: slide {name} has another row before; keep one")
        rows[name] = row
    if not rows:
        raise ValueError(f"{path} has no slides: a line each follows the first")
    _check_patients(rows)
    return SlideTable(path, tuple(head[place] for place in places), rows, split is not None)


def _place(head: Sequence[str], names: Sequence[str]) -> int | None:
    return next((head.index(name) for name in names if name in head), None)


def _label_places(path: Path, head: Sequence[str], columns: Sequence[str] | None) -> list[int]:
    reserved = {*SLIDE, *SPLIT, *PATIENT, *_OTHER}
    if columns is None:
        columns = [name for name in head if name not in reserved]
    missing = [name for name in columns if name not in head]
    if missing or not columns:
        what = f"no column {', '.join(missing)}" if missing else "no column of labels"
        raise ValueError(
            f"{path} has {what}; it has {', '.join(head)}: name columns of labels by "
            "data.columns=[...]"
        )
    return [head.index(name) for name in columns]


def _check_patients(rows: Mapping[str, SlideRow]) -> None:
    """Slides of one patient look alike: a validation on some of them would flatter."""
    splits: dict[str, SlideRow] = {}
    for row in rows.values():
        if row.patient is None or row.split is None:
            continue
        before = splits.setdefault(row.patient, row)
        if before.split != row.split:
            raise ValueError(
                f"{row.where}: patient {row.patient} is in the split {row.split}, and in "
                f"{before.split} before ({before.where}): all slides of a patient belong in one"
            )
