"""Paths of slides: files, and DICOM series, which are several files.

The path of a series is its folder, where nothing else lies in that, else FOLDER/UID, where UID is
its SeriesInstanceUID. A series of a single file may also be given as that file.
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
"""Of files that are slides, wherever they lie; PNG and JPEG images may be anything."""

_FOLDERS = 1024  # whose contents are kept
_SETTLED_NS = 2_000_000_000  # a folder may change again within one tick of its file system's clock


class _Contents(NamedTuple):
    """A folder.

    `series` are its DICOM series that are slides, `others` other files with the suffix of a slide;
    `members` and `by_uid` have the series of all kinds, by their files and their UIDs.
    """

    series: Sequence[Series]
    others: Sequence[Path]
    members: Mapping[Path, Series]
    by_uid: Mapping[str, Series]

    @property
    def whole(self) -> Series | None:
        """The series, if the folder has one and no other slide.

        A DICOM file that cannot be read is none.
        """
        one = len(self.series) == 1 and all(map(may_be_dicom, self.others))
        return self.series[0] if one else None


def slides_among(folder: Path, files: Iterable[Path]) -> list[Path]:
    """The paths of the slides among the files of one folder, in order.

    DICOM files of other kinds, such as annotations, are passed over.
    """
    found = _contents(files)
    if found.whole is not None:
        return sorted([folder, *found.others])
    series = [k.files[0] if len(k.files) == 1 else folder / k.uid for k in found.series]
    return sorted([*series, *found.others])


def series_at(path: Path) -> Series | None:
    """The series that a path stands for: its folder, FOLDER/UID, or one of its files.

    Returns:
        None where the path is no series, or a folder with another slide in it.
    """
    if path.is_dir():
        return _contents_of(path).whole
    is_file = path.is_file()
    if not (may_be_dicom(path) if is_file else is_uid(path.name)):
        return None
    found = _contents_of(path.parent)
    return found.members.get(path) if is_file else found.by_uid.get(path.name)


def slide_path(path: Path) -> Path:
    """The path of the slide that a file belongs to: itself, or its series."""
    series = series_at(path)
    if series is None or path.is_dir() or len(series.files) == 1:
        return path
    return path.parent if series_at(path.parent) == series else path.parent / series.uid


def slide_files(path: Path) -> Sequence[Path]:
    """The files of a slide, where these are known: those of a series, else itself."""
    series = series_at(path)
    return (path,) if series is None else series.files


def slide_bytes(path: Path) -> int:
    """Length of the files of a slide."""
    return sum(file.stat().st_size for file in slide_files(path))


def slide_source(path: Path) -> Path:
    """Where a slide lies, the same however it is given: a file, or FOLDER/UID of a series."""
    series = series_at(path)
    if series is None:
        return path.resolve()
    return series.files[0].parent.resolve() / series.uid


def slide_name(path: Path) -> str:
    """The name of a slide: that of its folder or its UID for a series, else without suffix."""
    if path.is_file() or series_at(path) is None:
        # a stem of dots alone would be a folder
        return path.stem if path.stem.strip(".") else path.name
    return path.resolve().name


def slide_aliases(path: Path) -> Sequence[str]:
    """Names by which files and tables refer to a slide, `slide_name` first."""
    series = series_at(path)
    uid = [] if series is None else [series.uid]
    return list(dict.fromkeys((slide_name(path), *([path.name] if path.name else []), *uid)))


def slide_addresses(path: Path) -> Sequence[Path]:
    """Absolute paths that stand for a slide: its own, and of a series its folder and its files."""
    series = series_at(path)
    if series is None:
        return [path.resolve()]
    folder = series.files[0].parent.resolve()
    found = [folder / series.uid, *(folder / file.name for file in series.files)]
    return [folder, *found] if series_at(folder) is not None else found


def _contents(files: Iterable[Path]) -> _Contents:
    files = sorted(files)
    series = grouped(files)
    members = {file: one for one in series for file in one.files}
    others = [k for k in files if k.suffix.lower() in SLIDE_SUFFIXES and k not in members]
    slides = [one for one in series if one.is_slide]
    return _Contents(slides, others, members, {one.uid: one for one in series})


def _contents_of(folder: Path) -> _Contents:
    """What is in a folder; it is read again once files were added or removed."""
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
