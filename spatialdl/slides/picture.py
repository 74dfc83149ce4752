"""A picture of what was cut from a slide: thumbnail, outline of the tissue, tiles."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from spatialdl.slides.tiling import TilePlan

_LONGEST = 1600
_OUTLINE, _TAKEN, _UNREADABLE = (0, 150, 60), (30, 80, 220), (220, 30, 30)


def save_picture(
    path: Path,
    plan: TilePlan,
    taken: Iterable[tuple[int, int]],
    unreadable: Iterable[tuple[int, int]] = (),
) -> None:
    """Draw a plan to a PNG.

    Args:
        path: the PNG to write.
        plan: the tiles of the slide; its thumbnail is the background.
        taken: level-0 (x, y) of the tiles that were written, drawn blue.
        unreadable: of those that could not be read, drawn red.
    """
    pixels = plan.thumbnail.image.copy()
    mask = plan.tissue.mask
    width = max(1, max(mask.shape) // 600)
    pixels[mask & ~ndimage.binary_erosion(mask, iterations=width, border_value=1)] = _OUTLINE
    picture = Image.fromarray(np.where(plan.thumbnail.missing[..., None], np.uint8(160), pixels))
    picture.thumbnail((_LONGEST, _LONGEST))
    scale = plan.thumbnail.scale * pixels.shape[1] / picture.width
    draw = ImageDraw.Draw(picture)
    for places, colour in ((taken, _TAKEN), (unreadable, _UNREADABLE)):
        for x, y in places:
            corners = [x / scale, y / scale, (x + plan.step) / scale, (y + plan.step) / scale]
            draw.rectangle(corners, outline=colour)
    path.parent.mkdir(exist_ok=True)
    picture.save(path)
