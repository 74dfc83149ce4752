"""The labels file of a tiling run: class and split of each slide."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from spatialdl.data.slide_table import PathIndex
from spatialdl.slides.reading.paths import slide_addresses, slide_aliases, slide_name
from spatialdl.slides.reading.resolution import PLAUSIBLE_MPP, is_plausible
from spatialdl.text import counted

COLUMNS = ("slide", "label", "split")
SPLITS = ("train", "val", "test")


class SlideLabel(NamedTuple):
    """A row of the labels file."""

    label: str  # empty if classes come from annotations
    split: str
    mpp: float | None = None  # of the slide's level 0, from the optional column mpp


def read_labels(
    path: Path, slides: Sequence[Path], *, unlabelled: str = "error", classes: bool = True
) -> dict[Path, SlideLabel]:
    """Read a CSV with the columns slide, label and split, and match it with the slides.

    An optional column mpp has micrometres per level-0 pixel; it may be empty.

    Args:
        path: the CSV; its `slide` is a file name, with or without the suffix, or the end of a
            path if files in several folders have that name; for a DICOM series its folder, its
            UID or one of its files.
        slides: the slides to be tiled.
        classes: every slide needs a label; else the column may be empty or missing.
        unlabelled: "skip" omits slides without a line from the result.

    Raises:
        ValueError: the file is missing or malformed, names a slide twice or an unknown slide, or
            has no line for a slide.
    """
    labels: dict[Path, SlideLabel] = {}
    unknown: list[str] = []
    index = slide_index(slides)
    for line, name, label in _rows(path, classes):
        slide = index.find(name, f"{path} line {line}")
        if slide is None:
            unknown.append(name)
        elif slide in labels:
            raise ValueError(f"{path} line {line}: slide {name!r} is a duplicate; keep one line")
        else:
            labels[slide] = label
    without = [slide.name or slide_name(slide) for slide in slides if slide not in labels]
    if unknown:
        rest = f"; slides without a line: {', '.join(without)}" if without else ""
        raise ValueError(
            f"{path} names {', '.join(unknown)}, which {_is(unknown)} among the slides given{rest}"
        )
    if without and unlabelled != "skip":
        raise ValueError(
            f"{path} has no line for {', '.join(without)}; add a line for each "
            f"({counted(len(without), 'slide')}), or skip them with --unlabelled skip"
        )
    return labels


def _rows(path: Path, classes: bool) -> list[tuple[int, str, SlideLabel]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = [str(name).strip() for name in reader.fieldnames or []]
            needed = [name for name in COLUMNS if classes or name != "label"]
            missing = [name for name in needed if name not in header]
            if missing:
                raise ValueError(
                    f"{path} has no column {', '.join(missing)}; its first line is "
                    f"{','.join(header)!r}, expected {','.join(needed)!r}"
                )
            reader.fieldnames = header
            return [
                _row(f"{path} line {reader.line_num}", reader.line_num, row, needed)
                for row in reader
            ]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file: {error}") from error
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read labels {path}: {error.strerror}") from error


def _row(
    where: str, line: int, row: dict[str | None, str | list[str] | None], needed: Sequence[str]
) -> tuple[int, str, SlideLabel]:
    slide, label, split = (str(row.get(name) or "").strip() for name in COLUMNS)
    for column, value in zip(COLUMNS, (slide, label, split), strict=True):
        if column in needed and not value:
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


def slide_index(slides: Sequence[Path]) -> PathIndex:
    """Look-up of slides by the end of their path, then by their name without suffix."""
    return PathIndex(slides, "slide", slide_addresses, slide_aliases)


def _is(names: Sequence[str]) -> str:
    return "is not" if len(names) == 1 else "are not"
