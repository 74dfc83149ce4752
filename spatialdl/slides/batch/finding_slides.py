"""The slides of a batch: files and folders as given, and a name for each."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from spatialdl.slides.reading.paths import (
    SLIDE_SUFFIXES,
    series_at,
    slide_name,
    slide_path,
    slide_source,
    slides_among,
)

_LONGEST_NAME = 240  # bytes; a file system takes 255, and files have names with more at the end


def find_slides(given: Sequence[Path], *, recursive: bool = False) -> list[Path]:
    """Files as given, folders by the slides in them, in order of their names.

    A DICOM series is one slide, whichever of its files are given; see `reading.paths`.

    Args:
        given: files and folders.
        recursive: look in folders of folders, too.

    Raises:
        ValueError: a path is missing, a folder has no slides, or a series lies in two folders.
    """
    slides: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = _slides_in(path, recursive)
            if not inside:
                raise ValueError(
                    f"folder {path} has no slides in it ({' '.join(SLIDE_SUFFIXES)}); other images "
                    "are named themselves, folders in it are looked into with --recursive"
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
    """Refuse a series whose files lie in several folders: of a slide OpenSlide reads one."""
    folders: dict[str, Path] = {}
    for slide in slides:
        series = series_at(slide)
        if series is None:
            continue
        folder = series.files[0].parent
        if folders.setdefault(series.uid, folder) != folder:
            raise ValueError(
                f"DICOM series {series.uid} lies in {folders[series.uid]} and in {folder}; put all "
                "its files into one folder, or give one of the two"
            )


def slide_names(
    slides: Sequence[Path], named: Callable[[Path], str] = slide_name
) -> dict[Path, str]:
    """What slides are called in the data set: as short as tells them from each other.

    The file name without suffix, of a DICOM series its folder or UID; with the suffix, or with the
    folders above, where others have the same.
    Bytes that are no UTF-8 are written out, and what is longer than a file system takes is
    shortened and ends with a digest.
    """
    names = {slide: named(slide) for slide in slides}
    for depth in range(1, max(len(slide.resolve().parts) for slide in slides) + 1):
        for slide in _not_alone(names):
            names[slide] = "_".join(slide.resolve().parts[-depth:]).lstrip("/")
    for number, slide in enumerate(_not_alone(names), 1):
        names[slide] += f"_{number}"
    return {slide: storable(name) for slide, name in names.items()}


def storable(name: str) -> str:
    """A name as that of a file: in one folder, and no longer than a file system takes.

    What has to be changed for that ends with a digest, or two names might become one.
    """
    try:
        coded = os.fsencode(name)
    except UnicodeEncodeError:  # half of a pair of UTF-16
        coded = name.encode(errors="backslashreplace")
    whole = coded.decode(errors="backslashreplace")
    plain = re.sub(r"[/\0]", "_", whole)
    if plain == whole and len(whole.encode()) <= _LONGEST_NAME and whole.strip("."):
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return plain.encode()[: _LONGEST_NAME - 13].decode(errors="ignore") + "-" + digest


def _not_alone(names: dict[Path, str]) -> list[Path]:
    # a file system may not tell capitals apart
    times = Counter(name.casefold() for name in names.values())
    return [slide for slide, name in names.items() if times[name.casefold()] > 1]
