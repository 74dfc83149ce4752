"""Diagnosis of TIFFs that openslide rejects: truncated files, damaged slide formats."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import tifffile

_BIG = (b"II+\0", b"MM\0+")
_APERIO = "Aperio"
_MAKERS = {
    **{"svs": _APERIO, "ndpi": "Hamamatsu", "scn": "Leica", "philips": "Philips"},
    "bif": "Ventana",
}
"""Manufacturers of slide formats that openslide supports, by tifffile's names."""


class _Layout(NamedTuple):
    """Layout of TIFF directories: struct formats of tag count and offset, bytes of a tag."""

    tags: str
    tag_bytes: int
    offset: str


def missing_part(path: Path) -> str:
    """Describe the first truncated directory or image of a TIFF; empty if it is complete.

    Raises:
        Exception: tifffile cannot read the file; it raises many kinds.
    """
    size = path.stat().st_size
    broken = _broken_directory(path, size)
    if broken:
        return broken
    with tifffile.TiffFile(path) as tiff:
        for number, page in enumerate(tiff.pages):
            end = _data_end(page)
            if end > size:
                return f"image {number} ends at byte {end}, the file at byte {size}"
    return ""


def _data_end(page: tifffile.TiffPage | tifffile.TiffFrame) -> int:
    """Where the pixels of a page end in the file."""
    places = zip(page.dataoffsets, page.databytecounts, strict=True)
    return max((start + length for start, length in places), default=0)


def slide_problem(tiff: tifffile.TiffFile) -> tuple[str, bool]:
    """Describe why a TIFF of a scanner manufacturer was rejected by openslide.

    Returns:
        A sentence, and whether the file must not be read as a plain image; empty and false for
        other TIFFs. ImageScope exports regions of slides as striped TIFFs, which are not slides.
    """
    page = tiff.pages.first
    maker = next((name for kind, name in _MAKERS.items() if getattr(page, f"is_{kind}", False)), "")
    if not maker:
        return "", False
    if maker == _APERIO and not page.is_tiled:
        return (
            f"the TIFF is from {_APERIO}, but its first image has strips instead of tiles, so "
            "openslide does not accept it as a slide; reading it as a plain image",
            False,
        )
    return f"openslide rejects this slide of {maker}: it is damaged or incomplete", True


def _broken_directory(path: Path, size: int) -> str:
    """Describe the first directory beyond the end of the file or in a cycle; else empty."""
    with path.open("rb") as file:
        head = file.read(16)
        order = "<" if head.startswith(b"II") else ">"
        big = head.startswith(_BIG)
        layout = _Layout("Q", 20, "Q") if big else _Layout("H", 12, "I")
        width = struct.calcsize(order + layout.tags)
        (offset,) = struct.unpack_from(order + layout.offset, head, 8 if big else 4)
        seen: set[int] = set()
        while offset:
            where = f"directory {len(seen)}, at byte {offset},"
            if offset in seen:
                return f"{where} was read before: the directories form a cycle"
            seen.add(offset)
            file.seek(offset)
            raw = file.read(width)
            if len(raw) < width:
                return f"{where} is beyond the end of the file, at byte {size}"
            (tags,) = struct.unpack(order + layout.tags, raw)
            file.seek(offset + width + tags * layout.tag_bytes)
            raw = file.read(struct.calcsize(order + layout.offset))
            if len(raw) < struct.calcsize(order + layout.offset):
                return f"{where} extends beyond the end of the file, at byte {size}"
            (offset,) = struct.unpack(order + layout.offset, raw)
    return ""
