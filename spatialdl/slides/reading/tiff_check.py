"""What is wrong with a TIFF that openslide refuses: parts beyond its end, or a slide format."""

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
"""Slide formats that openslide reads, by the names of tifffile."""


class _Layout(NamedTuple):
    """Of directories: struct formats of the number of tags and of an offset, bytes of a tag."""

    tags: str
    tag_bytes: int
    offset: str


def missing_part(path: Path) -> str:
    """The first directory or image of a TIFF that the file does not have whole; empty if none.

    Raises:
        Exception: tifffile cannot read it; it raises many kinds.
    """
    size = path.stat().st_size
    found = _broken_directory(path, size)
    if found:
        return found
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
    """What is odd about a TIFF by a maker of slides that openslide refuses.

    Returns:
        A sentence, and whether the file must not be read as a plain image; empty and false for
        other TIFFs. ImageScope writes regions of slides as TIFFs of strips, which are no slides.
    """
    page = tiff.pages.first
    maker = next((name for kind, name in _MAKERS.items() if getattr(page, f"is_{kind}", False)), "")
    if not maker:
        return "", False
    if maker == _APERIO and not page.is_tiled:
        return (
            f"the TIFF names {_APERIO} as its maker, but its first image has strips in place of "
            "tiles, so that openslide does not take it for a slide; read as a plain image",
            False,
        )
    return f"openslide refuses this slide of {maker}: it is damaged or incomplete", True


def _broken_directory(path: Path, size: int) -> str:
    """The first directory that does not lie in the file, or is part of a circle."""
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
                return f"{where} was read before: the directories form a circle"
            seen.add(offset)
            file.seek(offset)
            raw = file.read(width)
            if len(raw) < width:
                return f"{where} lies beyond the end of the file, at byte {size}"
            (tags,) = struct.unpack(order + layout.tags, raw)
            file.seek(offset + width + tags * layout.tag_bytes)
            raw = file.read(struct.calcsize(order + layout.offset))
            if len(raw) < struct.calcsize(order + layout.offset):
                return f"{where} goes beyond the end of the file, at byte {size}"
            (offset,) = struct.unpack(order + layout.offset, raw)
    return ""
