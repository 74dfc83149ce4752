"""A picture of what was cut from a slide: thumbnail, outline of the tissue, tiles."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy import ndimage

from spatialdl.slides.cutting.tiling import TilePlan
from spatialdl.slides.finding.regions import Region

_LONGEST, _SHORTEST = 1600, 800  # of the longer side; the thumbnail of a small slide is tiny
_OUTLINE, _REGION, _MISSING = (0, 150, 60), (140, 0, 200), (160, 160, 160)
_TAKEN, _UNREADABLE, _DROPPED = (30, 80, 220), (220, 30, 30), (240, 150, 0)


def save_picture(
    path: Path,
    plan: TilePlan,
    taken: Iterable[tuple[int, int]],
    unreadable: Iterable[tuple[int, int]] = (),
    dropped: Iterable[tuple[int, int]] = (),
    regions: Iterable[Region] = (),
) -> None:
    """Draw a plan to a PNG.

    Args:
        path: the PNG to write.
        plan: the tiles of the slide; its thumbnail is the background.
        taken: level-0 (x, y) of the tiles that were written, drawn blue.
        unreadable: of those that could not be read, drawn red.
        dropped: of those that a filter dropped, drawn orange.
        regions: annotated, their outlines and holes drawn purple.
    """
    thumbnail = plan.thumbnail
    height, width = thumbnail.missing.shape
    longest = min(_LONGEST, max(_SHORTEST, height, width))
    zoom = longest / max(height, width)
    size = max(1, round(width * zoom)), max(1, round(height * zoom))
    pixels = np.array(Image.fromarray(thumbnail.image).resize(size, Image.Resampling.BICUBIC))
    pixels[_resized(thumbnail.missing, size)] = _MISSING
    mask = _resized(plan.tissue.mask, size)
    thick = max(2, longest // 600)
    pixels[mask & ~ndimage.binary_erosion(mask, iterations=thick, border_value=1)] = _OUTLINE
    picture = Image.fromarray(pixels)
    draw = ImageDraw.Draw(picture)
    zoom /= thumbnail.scale
    for places, colour in ((taken, _TAKEN), (dropped, _DROPPED), (unreadable, _UNREADABLE)):
        for x, y in places:
            # neighbours' frames lie side by side, and those at the edge within the picture
            left, top = round(x * zoom), round(y * zoom)
            right = min(round((x + plan.step) * zoom), size[0]) - 1
            bottom = min(round((y + plan.step) * zoom), size[1]) - 1
            corners = [left, top, max(left, right), max(top, bottom)]
            draw.rectangle(corners, outline=colour, width=thick)
    for region in regions:
        for ring in (region.outline, *region.holes):
            corners_of_ring = [(x, y) for x, y in (np.vstack([ring, ring[:1]]) * zoom).tolist()]
            draw.line(corners_of_ring, fill=_REGION, width=thick)
    path.parent.mkdir(exist_ok=True)
    picture.save(path)


def _resized(mask: npt.NDArray[np.bool_], size: tuple[int, int]) -> npt.NDArray[np.bool_]:
    image = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.BILINEAR)
    return np.asarray(image) >= 128
