"""Pictures of the tiling of a slide: tissue and outlines of tiles; the tiles as written."""

from __future__ import annotations

from collections.abc import Iterable
from math import floor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy import ndimage

from spatialdl.common.files import replacing
from spatialdl.slides.finding.regions import Region
from spatialdl.slides.finding.tissue import Tissue
from spatialdl.slides.reading.reader import Thumbnail

_LONGEST, _SHORTEST = 1600, 800  # limits of the longer side; thumbnails of small slides are tiny
_OUTLINE, _REGION, _MISSING = (0, 150, 60), (140, 0, 200), (160, 160, 160)
PREVIEW = 2048
"""Largest number of rows or columns of a preview."""
_NOTHING = 208  # grey, to distinguish missing tiles from white glass
_QUALITY = 85
_TAKEN, _UNREADABLE, _DROPPED = (30, 80, 220), (220, 30, 30), (240, 150, 0)
LEGEND = (
    (_OUTLINE, "tissue"),
    (_TAKEN, "tile"),
    (_DROPPED, "tile dropped by a filter"),
    (_UNREADABLE, "tile that cannot be read"),
    (_REGION, "annotation"),
    (_MISSING, "slide that cannot be read"),
)
"""Colours (red, green, blue) of outlines, 0 to 255, and what they surround."""


def save_overview(
    path: Path, thumbnail: Thumbnail, tissue: Tissue, regions: Iterable[Region] = ()
) -> float:
    """Draw the tissue and the regions that tiles are selected by.

    Args:
        path: the picture to write.
        thumbnail: of the slide, contrast-stretched if that is dark; unreadable parts are grey.
        tissue: its outline is drawn green.
        regions: annotated; their outlines and holes are drawn purple.

    Returns:
        Pixels of the picture per level-0 pixel.
    """
    height, width = thumbnail.missing.shape
    longest = min(_LONGEST, max(_SHORTEST, height, width))
    zoom = longest / max(height, width)
    size = max(1, round(width * zoom)), max(1, round(height * zoom))
    image = Image.fromarray(tissue.shown(thumbnail.image))
    pixels = np.array(image.resize(size, Image.Resampling.BICUBIC))
    pixels[_resized(thumbnail.missing, size)] = _MISSING
    mask = _resized(tissue.mask, size)
    thick = _thickness(size)
    pixels[mask & ~ndimage.binary_erosion(mask, iterations=thick, border_value=1)] = _OUTLINE
    picture = Image.fromarray(pixels)
    draw = ImageDraw.Draw(picture)
    zoom /= thumbnail.scale
    for region in regions:
        for ring in (region.outline, *region.holes):
            corners = [(x, y) for x, y in (np.vstack([ring, ring[:1]]) * zoom).tolist()]
            draw.line(corners, fill=_REGION, width=thick)
    picture.save(path)
    return float(zoom)


def save_picture(
    path: Path,
    overview: Path,
    zoom: float,
    span: tuple[float, float],
    taken: Iterable[tuple[int, int]],
    unreadable: Iterable[tuple[int, int]] = (),
    dropped: Iterable[tuple[int, int]] = (),
) -> None:
    """Draw tiles on an overview.

    Args:
        path: the PNG to write.
        overview: written by `save_overview`.
        zoom: returned by `save_overview`.
        span: level-0 rows and columns of a tile.
        taken: level-0 (x, y) of written tiles, drawn blue.
        unreadable: of tiles that could not be read, drawn red.
        dropped: of tiles dropped by a filter, drawn orange.
    """
    with Image.open(overview) as opened:
        picture = opened.convert("RGB")
    draw = ImageDraw.Draw(picture)
    thick = _thickness(picture.size)
    for places, colour in ((taken, _TAKEN), (dropped, _DROPPED), (unreadable, _UNREADABLE)):
        for x, y in places:
            # frames of neighbours do not overlap, and those at the edge are inside the picture
            left, top = round(x * zoom), round(y * zoom)
            right = min(round((x + span[1]) * zoom), picture.size[0]) - 1
            bottom = min(round((y + span[0]) * zoom), picture.size[1]) - 1
            corners = [left, top, max(left, right), max(top, bottom)]
            draw.rectangle(corners, outline=colour, width=thick)
    picture.save(path, compress_level=1)


def preview_name(slide: str) -> str:
    """File name of the preview of a slide, beside its picture."""
    return f"{slide}.stitched.jpg"


def save_preview(
    path: Path,
    image: npt.NDArray[np.uint8],
    zoom: float,
    span: tuple[float, float],
    taken: Iterable[tuple[float, float]],
) -> None:
    """Write a JPEG of the tiles of a slide, each at its place, atomically.

    Args:
        path: the picture to write.
        image: the whole slide, uint8 (rows, cols, 3).
        zoom: pixels of the picture per level-0 pixel.
        span: level-0 rows and columns of a tile.
        taken: level-0 (x, y) of the tiles.
    """
    canvas = np.full_like(image, _NOTHING)
    for x, y in taken:
        # the end of a tile is rounded like the start of its neighbour, so that there are no gaps
        (top, bottom), (left, right) = (
            (_half_up(start * zoom), _half_up((start + length) * zoom))
            for start, length in zip((y, x), span, strict=True)
        )
        place = slice(top, max(top + 1, bottom)), slice(left, max(left + 1, right))
        canvas[place] = image[place]
    with replacing(path) as file:
        Image.fromarray(canvas).save(file, "JPEG", quality=_QUALITY)


def _half_up(number: float) -> int:
    return floor(number + 0.5)  # rounding half to even would leave gaps


def _thickness(size: tuple[int, int]) -> int:
    return max(2, max(size) // 400)  # visible in thumbnails, too


def _resized(mask: npt.NDArray[np.bool_], size: tuple[int, int]) -> npt.NDArray[np.bool_]:
    image = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.BILINEAR)
    return np.asarray(image) >= 128
