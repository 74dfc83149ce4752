"""Paths of slides: files, and DICOM series, which consist of several files.

The path of a series is its folder, if it is the only slide there, else FOLDER/UID, where UID is its
SeriesInstanceUID. The path of a series with a single file may also be that file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from spatialdl.slides.reading.dicom import Series, grouped, is_uid, may_be_dicom

SLIDE_SUFFIXES = (
    *(".bif", ".czi", ".dcm", ".mrxs", ".ndpi", ".ndpis", ".scn", ".svs", ".svslide"),
    *(".tif", ".tiff", ".vms", ".vmu", ".zvi"),
)
"""Suffixes of slides in folders; PNG and JPEG images need not be slides."""

_FOLDERS = 1024  # size of the cache of folder contents
_SETTLED_NS = 2_000_000_000  # age of a folder; newer ones may change within a tick of the clock


class _Contents(NamedTuple):
    """Contents of a folder.

    `series` are the DICOM series that are slides, `others` other files with the suffix of a slide;
    `members` and `by_uid` are the series of all kinds, by their files and their UIDs.
    """

    series: Sequence[Series]
    others: Sequence[Path]
    members: Mapping[Path, Series]
    by_uid: Mapping[str, Series]

    @property
    def whole(self) -> Series | None:
        """The series, if it is the only slide of the folder; unreadable DICOM files are ignored."""
        one = len(self.series) == 1 and all(map(may_be_dicom, self.others))
        return self.series[0] if one else None


def slides_among(folder: Path, files: Iterable[Path]) -> list[Path]:
    """List the paths of the slides among the files of one folder, sorted.

    DICOM files of other kinds, such as annotations, are ignored.
    """
    contents = _contents(files)
    if contents.whole is not None:
        return sorted([folder, *contents.others])
    series = [k.files[0] if len(k.files) == 1 else folder / k.uid for k in contents.series]
    return sorted([*series, *contents.others])


def series_at(path: Path) -> Series | None:
    """Return the series of a path: its folder, FOLDER/UID, or one of its files.

    Returns:
        None if the path is not a series, or a folder with several slides.
    """
    if path.is_dir():
        return _contents_of(path).whole
    is_file = path.is_file()
    if not (may_be_dicom(path) if is_file else is_uid(path.name)):
        return None
    contents = _contents_of(path.parent)
    return contents.members.get(path) if is_file else contents.by_uid.get(path.name)


def slide_path(path: Path) -> Path:
    """Return the path of the slide that a file belongs to: the file itself, or its series."""
    series = series_at(path)
    if series is None or path.is_dir() or len(series.files) == 1:
        return path
    return path.parent if series_at(path.parent) == series else path.parent / series.uid


def slide_files(path: Path) -> Sequence[Path]:
    """Return the files of a series; for all other slides the path itself."""
    series = series_at(path)
    return (path,) if series is None else series.files


def slide_bytes(path: Path) -> int:
    """Return the total length of the files of a slide."""
    return sum(file.stat().st_size for file in slide_files(path))


def slide_source(path: Path) -> Path:
    """Return the canonical path of a slide: the resolved file, or FOLDER/UID of a series."""
    series = series_at(path)
    if series is None:
        return path.resolve()
    return series.files[0].parent.resolve() / series.uid


def slide_name(path: Path) -> str:
    """Return the name of a slide: folder or UID of a series, else the name without suffix."""
    if path.is_file() or series_at(path) is None:
        # a stem of only dots would be a folder
        return path.stem if path.stem.strip(".") else path.name
    return path.resolve().name


def slide_aliases(path: Path) -> Sequence[str]:
    """Return the names by which files and tables refer to a slide, `slide_name` first."""
    series = series_at(path)
    uid = [] if series is None else [series.uid]
    return list(dict.fromkeys((slide_name(path), *([path.name] if path.name else []), *uid)))


def slide_addresses(path: Path) -> Sequence[Path]:
    """Return all absolute paths of a slide: its own; for a series its folder and files, too."""
    series = series_at(path)
    if series is None:
        return [path.resolve()]
    folder = series.files[0].parent.resolve()
    paths = [folder / series.uid, *(folder / file.name for file in series.files)]
    return [folder, *paths] if series_at(folder) is not None else paths


def _contents(files: Iterable[Path]) -> _Contents:
    files = sorted(files)
    series = grouped(files)
    members = {file: each for each in series for file in each.files}
    others = [k for k in files if k.suffix.lower() in SLIDE_SUFFIXES and k not in members]
    slides = [each for each in series if each.is_slide]
    return _Contents(slides, others, members, {each.uid: each for each in series})


def _contents_of(folder: Path) -> _Contents:
    """Contents of a folder, cached until files are added or removed."""
    try:
        status = folder.stat()
    except OSError:
        return _contents([])
    if time.time_ns() - status.st_mtime_ns < _SETTLED_NS:
        return _contents(_files(folder))
    return _known_contents(folder, (status.st_dev, status.st_ino, status.st_mtime_ns))


@lru_cache(_FOLDERS)
def _known_contents(folder: Path, state: tuple[int, int, int]) -> _Contents:
    return _contents(_files(folder))


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_file()]
    except OSError:
        return []
