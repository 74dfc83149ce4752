"""DICOM series: files of a folder that form one slide, one file per level or picture.

OpenSlide opens a series by any of its files and finds the rest in the same folder.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from spatialdl.errors import SlideError

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
