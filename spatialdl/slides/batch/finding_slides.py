"""The slides of a batch: paths from files and folders, a unique name for each, and labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from spatialdl.common.files import storable
from spatialdl.common.text import counted
from spatialdl.data.tables import LABEL, SPLIT, PathIndex, TableRow, read_table
from spatialdl.slides.reading.paths import (
    SLIDE_SUFFIXES,
    series_at,
    slide_addresses,
    slide_aliases,
    slide_name,
    slide_path,
    slide_source,
    slides_among,
)
from spatialdl.slides.reading.resolution import PLAUSIBLE_MPP, is_plausible


def find_slides(paths: Sequence[Path], *, recursive: bool = False) -> list[Path]:
    """List slides: files as given, folders replaced by the slides in them, sorted by name.

    A DICOM series is one slide, given by any of its files; see `reading.paths`.

    Args:
        paths: files and folders.
        recursive: search subfolders, too.

    Raises:
        ValueError: a path is missing, a folder has no slides, or a series is in two folders.
    """
    slides: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = _slides_in(path, recursive)
            if not inside:
                raise ValueError(
                    f"folder {path} has no slides in it ({' '.join(SLIDE_SUFFIXES)}); give other "
                    "images by their paths, or search subfolders with --recursive"
                )
            slides.extend(inside)
        elif not path.exists() and series_at(path) is None:
            raise ValueError(f"cannot find slide {path}: there is no such file or folder")
        else:
            slides.append(slide_path(path))
    seen: dict[Path, Path] = {}
    for slide in slides:
        seen.setdefault(slide_source(slide), slide)
    _check_folders(seen.values())
    return list(seen.values())


def _slides_in(folder: Path, recursive: bool) -> list[Path]:
    files: dict[Path, list[Path]] = {}
    for path in folder.rglob("*") if recursive else folder.iterdir():
        if path.is_file():
            files.setdefault(path.parent, []).append(path)
    return sorted(slide for where, some in files.items() for slide in slides_among(where, some))


def _check_folders(slides: Iterable[Path]) -> None:
    """Raise if a series is in several folders: OpenSlide reads only one folder."""
    folders: dict[str, Path] = {}
    for slide in slides:
        series = series_at(slide)
        if series is None:
            continue
        folder = series.files[0].parent
        if folders.setdefault(series.uid, folder) != folder:
            raise ValueError(
                f"DICOM series {series.uid} is in {folders[series.uid]} and in {folder}; put all "
                "its files into one folder, or give only one of the two"
            )


def slide_names(
    slides: Sequence[Path], named: Callable[[Path], str] = slide_name
) -> dict[Path, str]:
    """Choose the names of slides in the data set: as short as possible, and unique.

    A name is the file name without suffix, for a DICOM series its folder or UID. Names that occur
    twice have the suffix, and as many parent folders as needed. Bytes that are not UTF-8 are
    escaped. Names too long for a file system are shortened and end with a digest.
    """
    names = {slide: named(slide) for slide in slides}
    for depth in range(1, max(len(slide.resolve().parts) for slide in slides) + 1):
        for slide in _duplicates(names):
            names[slide] = "_".join(slide.resolve().parts[-depth:]).lstrip("/")
    for number, slide in enumerate(_duplicates(names), 1):
        names[slide] += f"_{number}"
    return {slide: storable(name) for slide, name in names.items()}


def _duplicates(names: dict[Path, str]) -> list[Path]:
    # file systems may be case-insensitive
    times = Counter(name.casefold() for name in names.values())
    return [slide for slide, name in names.items() if times[name.casefold()] > 1]


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
