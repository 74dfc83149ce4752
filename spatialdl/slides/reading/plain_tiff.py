"""TIFFs that openslide does not support: read strip by strip, or why they are refused."""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tifffile

from spatialdl.errors import SlideError
from spatialdl.layout.layout import by
from spatialdl.slides.reading.native import tiles_under
from spatialdl.slides.reading.plain_image import Header

Bytes = npt.NDArray[np.uint8]

_CACHE = 2**27  # bytes of decoded strips cached
_LARGEST_STRIP = 2**28  # bytes
_WHITE_IS_0, _GREY, _RGB, _PALETTE, _YCBCR = 0, 1, 2, 3, 6
_CHANNELS = {_WHITE_IS_0: 1, _GREY: 1, _RGB: 3, _PALETTE: 1, _YCBCR: 3}
_SEPARATE, _PREMULTIPLIED = 2, 1
_JPEG = 7
_UNITS = {2: 25_400.0, 3: 10_000.0}  # micrometres per inch and per centimetre
_BIG = (b"II+\0", b"MM\0+")
_APERIO = "Aperio"
_MAKERS = {
    **{"svs": _APERIO, "ndpi": "Hamamatsu", "scn": "Leica", "philips": "Philips"},
    "bif": "Ventana",
}
"""Manufacturers of slide formats that openslide supports, by tifffile's names."""


class TiffPixels:
    """The pixels of the first page of a TIFF.

    Strips or tiles are decoded on demand and cached. Contiguous uncompressed pixels are
    memory-mapped.

    Args:
        path: a TIFF checked by `header`.
    """

    def __init__(self, path: Path) -> None:
        self._tiff = tifffile.TiffFile(path)
        self._page = page = self._tiff.pages.first
        photometric = int(page.photometric)
        self._inverted = photometric == _WHITE_IS_0
        self._palette = _palette(page) if photometric == _PALETTE else None
        self.premultiplied = bool(page.extrasamples) and int(page.extrasamples[0]) == _PREMULTIPLIED
        samples = page.samplesperpixel if self._palette is None else 3
        self.shape = (page.imagelength, page.imagewidth, samples)
        self._mapped = _mapped(page)
        self._segment = lru_cache(max(1, _CACHE // int(np.prod(page.chunks))))(self._decoded)

    def box(self, top: int, bottom: int, left: int, right: int) -> Bytes:
        """Return a box inside the image, (rows, cols, channels); missing strips are white."""
        if self._mapped is not None:
            box = np.array(self._mapped[top:bottom, left:right])
        else:
            box = self._assembled(top, bottom, left, right)
        if self._inverted:
            box[..., 0] = 255 - box[..., 0]
        return box if self._palette is None else self._palette[box[..., 0]]

    def close(self) -> None:
        """Close the file."""
        self._tiff.close()
        self._segment.cache_clear()
        self._mapped = None

    def _assembled(self, top: int, bottom: int, left: int, right: int) -> Bytes:
        page = self._page
        samples = page.samplesperpixel
        th, tw = page.chunks[0:2] if page.planarconfig != _SEPARATE else page.chunks[-2:]
        nothing = 0 if self._inverted else 255
        box = np.full((bottom - top, right - left, samples), nothing, np.uint8)
        across, down = -(-page.imagewidth // tw), -(-page.imagelength // th)
        planes = samples if page.planarconfig == _SEPARATE else 1
        for plane in range(planes):
            channel = slice(plane, plane + 1) if planes > 1 else slice(None)
            for i, j, to, of in tiles_under((top, bottom, left, right), (th, tw)):
                part = self._segment((plane * down + i) * across + j)
                if part is not None:
                    box[(*to, channel)] = part[of]
        return box

    def _decoded(self, number: int) -> Bytes | None:
        """A strip or tile, (rows, cols, channels); None if it is missing."""
        page = self._page
        length = page.databytecounts[number]
        if not length:
            return None
        file = self._tiff.filehandle
        file.seek(page.dataoffsets[number])
        data = file.read(length)
        more = {"jpegtables": page.jpegtables} if int(page.compression) == _JPEG else {}
        part = page.decode(data, number, **more)[0]
        if part is None:
            return None
        return np.asarray(part[0])  # without the depth dim, of size 1


def header(path: Path) -> Header:
    """Read the size and resolution of a TIFF, and check that `TiffPixels` can read it.

    Raises:
        SlideError: the file is truncated, not supported, needs too much memory, or is of a slide
            format that openslide should read.
    """
    size = path.stat().st_size
    again = "copy it again, or convert it to a tiled TIFF"
    try:
        problem = missing_part(path)
        if problem:
            problem = f"the TIFF is cut short or damaged ({problem}); {again}"
        else:
            with tifffile.TiffFile(path) as tiff:
                page = tiff.pages.first
                remark, is_slide = slide_problem(tiff)
                unsupported = _not_one_picture(tiff) or _unsupported(page)
                problem = f"{remark}; {again}" if is_slide else unsupported
                info = Header((page.imagelength, page.imagewidth), _resolution(page), remark)
    except Exception as error:  # tifffile raises many kinds for a damaged file
        raise SlideError(
            f"cannot open slide {path}: the TIFF is cut short or not supported by openslide "
            f"({size} bytes); compare its size with the original, or convert it to a tiled TIFF"
        ) from error
    if problem:
        raise SlideError(f"cannot open slide {path}: {problem}")
    return info


def what_is_lost(path: Path) -> str:
    """Why the pixels of a TIFF are not those of one image in 8 bits; empty if they are.

    OpenSlide makes RGB of anything that libtiff reads: of the first channel, of the upper bits.
    """
    with tifffile.TiffFile(path) as tiff:
        return _not_one_picture(tiff)


def _not_one_picture(tiff: tifffile.TiffFile) -> str:
    page = tiff.pages.first
    second: Any = tiff.pages.get(1) if len(tiff.pages) > 1 else None
    size = (page.imagelength, page.imagewidth)
    if second is not None and (second.imagelength, second.imagewidth) == size:
        return (
            f"the TIFF has several pages of {by(size)}, such as channels or slices, of which one "
            "would be read; save one page or RGB, or import them as a volume"
        )
    return _pixels_unsupported(page)


def _pixels_unsupported(page: tifffile.TiffPage) -> str:
    photometric = int(page.photometric)
    if page.dtype != np.uint8 or page.bitspersample != 8:
        bits = f"{page.bitspersample} bits per channel"
        return f"the TIFF has {bits}, supported are 8; convert it to 8 bits"
    alpha = page.samplesperpixel - _CHANNELS.get(photometric, 0)
    if photometric not in _CHANNELS or not 0 <= alpha <= 1 or page.imagedepth != 1:
        kind = getattr(page.photometric, "name", photometric)
        return (
            f"the TIFF is {kind} with {page.samplesperpixel} channels, supported are grey and "
            "RGB, with or without alpha; convert it to RGB"
        )
    return ""


def _unsupported(page: tifffile.TiffPage) -> str:
    """Why this reader does not support the pixels of a picture; empty if it does."""
    photometric = int(page.photometric)
    if photometric == _YCBCR and int(page.compression) != _JPEG:
        return "the TIFF is YCbCr without JPEG compression; convert it to RGB"
    strip = int(np.prod(page.chunks))
    if strip > _LARGEST_STRIP and _mapped(page) is None:
        return (
            f"a strip of the TIFF needs {strip / 1e9:.1f} GB of memory, more than "
            f"{_LARGEST_STRIP / 1e9:.1f}; convert it to a tiled TIFF"
        )
    return ""


def _mapped(page: tifffile.TiffPage) -> Bytes | None:
    """All pixels, memory-mapped; None unless they are contiguous and uncompressed."""
    if not page.is_memmappable or page.planarconfig == _SEPARATE:
        return None
    shape = (page.imagelength, page.imagewidth, page.samplesperpixel)
    return np.memmap(page.parent.filehandle.path, np.uint8, "r", page.dataoffsets[0], shape)


def _palette(page: tifffile.TiffPage) -> Bytes:
    """RGB of each byte; the file has 16 bits per colour."""
    if page.colormap is None:
        raise ValueError("the TIFF has no colour map")
    return np.asarray(page.colormap.T >> 8, np.uint8)


def _resolution(page: tifffile.TiffPage) -> dict[str, str]:
    unit = _UNITS.get(int(page.tags.valueof("ResolutionUnit", 2)))
    properties = {"tiff.ImageDescription": str(page.description)}
    for axis in "xy":
        above, below = page.tags.valueof(f"{axis.upper()}Resolution", (0, 1))
        if unit and above and below:
            properties[f"openslide.mpp-{axis}"] = repr(unit * below / above)
    return properties


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
        # formats of the number of tags and of an offset, and the bytes of a tag
        of_tags, of_offset, tag_bytes = (
            (f"{order}Q", f"{order}Q", 20) if big else (f"{order}H", f"{order}I", 12)
        )
        width = struct.calcsize(of_tags)
        (offset,) = struct.unpack_from(of_offset, head, 8 if big else 4)
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
            (tags,) = struct.unpack(of_tags, raw)
            file.seek(offset + width + tags * tag_bytes)
            raw = file.read(struct.calcsize(of_offset))
            if len(raw) < struct.calcsize(of_offset):
                return f"{where} extends beyond the end of the file, at byte {size}"
            (offset,) = struct.unpack(of_offset, raw)
    return ""
