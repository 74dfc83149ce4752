"""Stain normalisation of slides: reference colours, and colours of a slide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.cutting.stains import (
    Colours,
    LabColours,
    Method,
    StainColours,
    colours_of,
)
from spatialdl.slides.cutting.tiling import TilePlan
from spatialdl.slides.reading.reader import Slide

Bytes = npt.NDArray[np.uint8]

_TILES = 24  # sampled per slide
_PIXELS = 4096  # sampled per tile
_GOLDEN = (5**0.5 - 1) / 2

# Hematoxylin and eosin of typical strength: the reference in M. Veta's implementation of
# Macenko et al., github.com/mitkovetta/staining-normalization (HERef, maxCRef)
_STAINS = StainColours(
    np.array([[0.5626, 0.7201, 0.4062], [0.2159, 0.8012, 0.5581]]), np.array([1.9705, 1.0308])
)
# the colours of CMU-1-Small-Region.svs of OpenSlide's test data (CC0), normalised to these stains
_COLOURS = LabColours(np.array([63.50, 21.44, -11.09]), np.array([15.19, 5.16, 4.57]))
BUILT_IN: Mapping[Method, Colours] = {
    "macenko": _STAINS,
    "reinhard": _COLOURS,
    "vahadane": _STAINS,
}


def reference_colours(method: Method, image: Path | None) -> Colours:
    """Return the target colours: those of an image file, or the built-in ones.

    Raises:
        ValueError: the file is not an image, or has too little stained tissue.
    """
    if image is None:
        return BUILT_IN[method]
    try:
        with Image.open(image) as opened:
            pixels = np.asarray(opened.convert("RGB")).reshape(-1, 3)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot read stain reference {image}: {error}") from error
    try:
        return colours_of(_spread(pixels, _TILES * _PIXELS), method)
    except SlideError as error:
        raise ValueError(f"stain reference {image} cannot be used: {error}") from error


def own_colours(
    slide: Slide, plan: TilePlan, method: Method, refused: Callable[[Bytes], object]
) -> Colours:
    """Estimate the colours of a slide.

    Args:
        slide: an open slide.
        plan: its tiles.
        method: "macenko", "reinhard" or "vahadane".
        refused: true for tiles to exclude, such as those with ink.

    Raises:
        SlideError: too little stained tissue.
    """
    try:
        return colours_of(sampled(slide, plan, refused), method)
    except SlideError as error:
        raise SlideError(f"cannot normalise the stains of slide {slide.path}: {error}") from error


def sampled(slide: Slide, plan: TilePlan, refused: Callable[[Bytes], object]) -> Bytes:
    """Sample pixels (pixels, 3) of up to 24 evenly spread tiles of a plan, deterministically.

    Refused and damaged tiles are replaced by other tiles.
    """
    parts = [np.empty((0, 3), np.uint8)]
    # steps of the golden ratio: any number of them is evenly spread
    for number in np.argsort(np.arange(len(plan.places)) * _GOLDEN % 1):
        x, y = plan.places[number]
        try:
            image = slide.read_scaled(x, y, (plan.tile_size, plan.tile_size), plan.scale)
        except SlideError:
            continue  # reported when the tile is cut
        if not refused(image):
            parts.append(_spread(image.reshape(-1, 3), _PIXELS))
        if len(parts) > _TILES:
            break
    return np.concatenate(parts)


def _spread(pixels: Bytes, count: int) -> Bytes:
    # an odd step, since a divisor of the width would sample only some columns
    return pixels[:: max(1, len(pixels) // count) | 1]
