"""The labels file of a tiling run: class and split of each slide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from spatialdl.common.text import counted
from spatialdl.data.tables import LABEL, SPLIT, PathIndex, TableRow, read_table
from spatialdl.slides.reading.paths import slide_addresses, slide_aliases, slide_name
from spatialdl.slides.reading.resolution import PLAUSIBLE_MPP, is_plausible

MPP = "mpp"


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
    table = read_table(path, required=(LABEL, SPLIT) if classes else (SPLIT,))
    labels: dict[Path, SlideLabel] = {}
    unknown: list[str] = []
    index = slide_index(slides)
    for row in table.rows:
        slide, label = index.find(row.name, row.where), _label_of(row)
        if classes and not label.label:
            raise ValueError(f"{row.where}: {LABEL} is empty")
        if slide is None:
            unknown.append(row.name)
        elif slide in labels:
            raise ValueError(f"{row.where}: slide {row.name!r} is a duplicate; keep one line")
        else:
            labels[slide] = label
    without = [slide.name or slide_name(slide) for slide in slides if slide not in labels]
    if unknown:
        rest = f"; slides without a line: {', '.join(without)}" if without else ""
        raise ValueError(f"{path} names {', '.join(unknown)}, not among the slides given{rest}")
    if without and unlabelled != "skip":
        raise ValueError(
            f"{path} has no line for {', '.join(without)}; add a line for each "
            f"({counted(len(without), 'slide')}), or skip them with --unlabelled skip"
        )
    return labels


def _label_of(row: TableRow) -> SlideLabel:
    split, text = row.usual_split(), row.cells.get(MPP, "")
    try:
        mpp = float(text) if text else None
    except ValueError:
        mpp = 0.0
    if mpp is not None and not is_plausible(mpp):
        low, high = PLAUSIBLE_MPP
        raise ValueError(
            f"{row.where}: mpp is {text!r}, expected micrometres per pixel between {low:g} and "
            f"{high:g}"
        )
    return SlideLabel(row.cells.get(LABEL, ""), split, mpp)


def slide_index(slides: Sequence[Path]) -> PathIndex:
    """Look-up of slides by the end of their path, then by their name without suffix."""
    return PathIndex(slides, "slide", slide_addresses, slide_aliases)
