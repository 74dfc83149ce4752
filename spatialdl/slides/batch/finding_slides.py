"""The slides of a batch: paths from files and folders, and a unique name for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from spatialdl.common.files import storable
from spatialdl.slides.reading.paths import (
    SLIDE_SUFFIXES,
    series_at,
    slide_name,
    slide_path,
    slide_source,
    slides_among,
)


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
