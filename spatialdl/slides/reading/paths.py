"""Paths of slides: files, and DICOM series, which consist of several files.

The path of a series is its folder, if it is the only slide there, else FOLDER/UID, where UID is its
SeriesInstanceUID. The path of a series with a single file may also be that file. OpenSlide opens a
series by any of its files and finds the rest in the same folder.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from spatialdl.errors import SlideError

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


_SUFFIX, _START = ".dcm", b"DICM"  # the start follows a preamble
_PREAMBLE = 128
_SLIDE_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.6"  # VL Whole Slide Microscopy Image Storage
_CLASS, _SERIES = 0x00080016, 0x0020000E  # tags, before the pixels
_UID = re.compile(r"[0-9][0-9.]{0,63}")
_KNOWN = 2**16  # size of the cache of headers


class Series(NamedTuple):
    """A series: its SeriesInstanceUID, its files in order, and whether it is a slide.

    Annotations and other images in DICOM format are not slides.
    """

    uid: str
    files: tuple[Path, ...]
    is_slide: bool


def is_uid(name: str) -> bool:
    """Whether a name has the form of a UID."""
    return _UID.fullmatch(name) is not None


def may_be_dicom(path: Path) -> bool:
    """Whether the name of a file may be that of DICOM: *.dcm, without suffix, or a UID."""
    return path.suffix.lower() == _SUFFIX or not path.suffix or path.suffix[1:].isdecimal()


def is_dicom(start: bytes) -> bool:
    """Whether a file with these first bytes is DICOM."""
    return start.startswith(_START, _PREAMBLE)


def grouped(files: Iterable[Path]) -> list[Series]:
    """Group the DICOM files of one folder by series, sorted by UID.

    Raises:
        SlideError: there are some, but pydicom is not installed.
    """
    series: dict[str, list[tuple[Path, str]]] = {}
    for path in sorted(files):
        if (header := _header(path)) is not None:
            series.setdefault(header[0], []).append((path, header[1]))
    return [
        Series(
            uid,
            tuple(path for path, _ in members),
            any(kind == _SLIDE_CLASS for _, kind in members),
        )
        for uid, members in sorted(series.items())
    ]


def _header(path: Path) -> tuple[str, str] | None:
    """Series UID and SOP class of a file; None if it is not readable DICOM."""
    if not may_be_dicom(path):
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return _known_header(path, status.st_size, status.st_mtime_ns)


@lru_cache(_KNOWN)
def _known_header(path: Path, size: int, changed_ns: int) -> tuple[str, str] | None:
    try:
        with path.open("rb") as file:
            if not is_dicom(file.read(_PREAMBLE + len(_START))):
                return None
    except OSError:
        return None
    try:
        from pydicom.filereader import read_partial
    except ImportError:
        raise SlideError(
            f"{path} is a DICOM file, whose series requires pydicom: pip install 'spatialdl[dicom]'"
        ) from None
    try:
        with path.open("rb") as file, warnings.catch_warnings(action="ignore"):
            dataset = read_partial(
                file, lambda tag, vr, length: tag > _SERIES, specific_tags=[_CLASS, _SERIES]
            )
            kind, uid = (str(dataset[tag].value) for tag in (_CLASS, _SERIES))
    except Exception:  # pydicom raises many kinds for a damaged file; OpenSlide reports the error
        return None
    return (uid, kind) if is_uid(uid) else None


def find_beside(folder: Path, slide: Path, suffixes: Sequence[str], what: str) -> Path:
    """Find the file in `folder` named like a slide: `a.png` or `a.svs.png` for `a.svs`.

    For a DICOM series, the name is that of its folder, if it has no other slide, or its UID.

    Args:
        folder: may be the slide's own; the slide itself does not match.
        slide: the slide.
        suffixes: of the file, in lower or upper case.
        what: kind of file for messages, such as "mask".

    Raises:
        SlideError: no file matches, or more than one.
    """
    matches: list[Path] = []
    names, own = slide_aliases(slide), slide_files(slide)
    for name in names:
        for suffix in suffixes:
            for path in (folder / f"{name}{suffix}", folder / f"{name}{suffix.upper()}"):
                # on case-insensitive file systems both paths are the same file
                if path.is_file() and not any(path.samefile(k) for k in (*own, *matches)):
                    matches.append(path)
    if not matches:
        raise SlideError(
            f"slide {slide} has no {what}: there is no {names[0]}{suffixes[0]} in {folder} "
            f"(nor {', '.join(suffixes[1:])})"
        )
    if len(matches) > 1:
        names = " and ".join(path.name for path in matches)
        raise SlideError(f"slide {slide} has more than one {what} in {folder}: {names}; keep one")
    return matches[0]
