"""The labels file of a tiling run: which class and split each slide has."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from spatialdl.slides.reading.resolution import PLAUSIBLE_MPP, is_plausible

COLUMNS = ("slide", "label", "split")
SPLITS = ("train", "val", "test")


class SlideLabel(NamedTuple):
    """What the labels file says of a slide."""

    label: str
    split: str
    mpp: float | None = None  # of the slide's level 0, where the file has that column


def read_labels(path: Path, slides: Sequence[Path]) -> dict[Path, SlideLabel]:
    """Read a CSV with the columns slide, label and split, and match it with the slides.

    A column mpp may say the micrometres per level-0 pixel of some slides or all.

    Args:
        path: the CSV; its `slide` is a file name, with or without the suffix, or the end of a
            path where files in several folders have that name.
        slides: the slides to be tiled.

    Raises:
        ValueError: the file is missing or malformed, or does not name every slide once.
    """
    found: dict[Path, SlideLabel] = {}
    unknown: list[str] = []
    for line, name, label in _rows(path):
        slide = _match(name, slides, f"{path} line {line}")
        if slide is None:
            unknown.append(name)
        elif slide in found:
            raise ValueError(f"{path} line {line}: slide {name!r} was named before; keep one line")
        else:
            found[slide] = label
    if unknown:
        raise ValueError(
            f"{path} names {_some(unknown)}, which {_is(unknown)} among the slides given; "
            f"slides given: {_some([slide.name for slide in slides])}"
        )
    without = [slide.name for slide in slides if slide not in found]
    if without:
        raise ValueError(
            f"{path} has no line for {_some(without)}; add a label for every slide, or tile "
            "without --labels"
        )
    return found


def _rows(path: Path) -> list[tuple[int, str, SlideLabel]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = [str(name).strip() for name in reader.fieldnames or []]
            missing = [name for name in COLUMNS if name not in header]
            if missing:
                raise ValueError(
                    f"{path} has no column {', '.join(missing)}; its first line is "
                    f"{','.join(header)!r}, expected {','.join(COLUMNS)!r}"
                )
            reader.fieldnames = header
            return [_row(f"{path} line {reader.line_num}", reader.line_num, row) for row in reader]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file: {error}") from error
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read labels {path}: {error.strerror}") from error


def _row(
    where: str, line: int, row: dict[str | None, str | list[str] | None]
) -> tuple[int, str, SlideLabel]:
    slide, label, split = (str(row[name] or "").strip() for name in COLUMNS)
    for column, value in zip(COLUMNS, (slide, label, split), strict=True):
        if not value:
            raise ValueError(f"{where}: {column} is empty")
    if split not in SPLITS:
        raise ValueError(f"{where}: split is {split!r}, expected {', '.join(SPLITS)}")
    return line, slide, SlideLabel(label, split, _mpp(where, row.get("mpp")))


def _mpp(where: str, value: object) -> float | None:
    text = str(value or "").strip()
    if not text:
        return None
    low, high = PLAUSIBLE_MPP
    try:
        mpp = float(text)
    except ValueError:
        mpp = float("nan")
    if not is_plausible(mpp):
        raise ValueError(
            f"{where}: mpp is {text!r}, expected micrometres per pixel between {low:g} and {high:g}"
        )
    return mpp


def _match(name: str, slides: Sequence[Path], where: str) -> Path | None:
    parts = Path(name).parts
    for matches in (
        [slide for slide in slides if slide.resolve().parts[-len(parts) :] == parts],
        [slide for slide in slides if slide.stem == name],
    ):
        if len(matches) > 1:
            raise ValueError(
                f"{where}: slide {name!r} may be {_some([str(slide) for slide in matches])}; "
                "write it with its suffix, and its folder where that is not enough"
            )
        if matches:
            return matches[0]
    return None


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _is(names: Sequence[str]) -> str:
    return "is not" if len(names) == 1 else "are not"
