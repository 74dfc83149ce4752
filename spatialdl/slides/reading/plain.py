"""Plain images as slides of one level: TIFFs that openslide does not read, PNG, JPEG."""

from __future__ import annotations

from pathlib import Path

from spatialdl.slides.reading import plain_decoded, plain_tiff
from spatialdl.slides.reading.plain_image import Header, PlainImage

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PNG_START, JPEG_START = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
PLAIN_SUFFIXES = (".png", ".jpg", ".jpeg")


def is_plain(start: bytes) -> bool:
    """Whether a file that begins so is a TIFF, PNG or JPEG."""
    return start.startswith((*TIFF_STARTS, PNG_START, JPEG_START))


def open_plain(path: Path, start: bytes) -> PlainImage:
    """Open a TIFF, PNG or JPEG.

    Args:
        path: the file.
        start: its first bytes.

    Raises:
        SlideError: it is cut short, of a kind that is not read, or would take too much memory.
    """
    if start.startswith(TIFF_STARTS):
        header = plain_tiff.header(path)
        return PlainImage(path, header, lambda: plain_tiff.TiffPixels(path))
    kind = plain_decoded.PNG if start.startswith(PNG_START) else plain_decoded.JPEG
    size = plain_decoded.checked_size(path, kind)
    return PlainImage(path, Header(size, {}), lambda: plain_decoded.DecodedPixels(path, kind))
