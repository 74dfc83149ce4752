"""Filters that drop tiles: black, white, marked with a pen, out of focus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter
from skimage.measure import blur_effect

Bytes = npt.NDArray[np.uint8]

_BLACK, _WHITE = 25, 220  # largest and smallest channel value of black and white pixels
# ink of pens: hues in degrees, saturation and value 0 to 255
_GREEN_TO_BLUE, _STRONG, _DARK, _GREY = (75.0, 235.0), 90, 90, 50
_DULL = 40  # smallest value of coloured ink; the hue of shadows and black frames is noise


class Filter(NamedTuple):
    """What a filter measures in a tile, 0 to 1; tiles with more than `most` are dropped."""

    measure: Callable[[Bytes], float]
    most: float


def refused_by(image: Bytes, most: Mapping[str, float]) -> str | None:
    """Return the name of the first filter that drops a tile, or None.

    Args:
        image: uint8 (rows, cols, 3).
        most: largest accepted value of each requested filter, by name.
    """
    for name, (measure, _) in FILTERS.items():  # cheap filters first
        if name in most and measure(image) > most[name]:
            return name
    return None


def parse_filters(text: str) -> dict[str, float]:
    """Parse `blur,pen=0.2`: names of filters, optionally with their largest accepted value.

    Raises:
        ValueError: a name is unknown or repeated, or a number not between 0 and 1.
    """
    most: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (word.strip() for word in part.partition("="))
        if name not in FILTERS:
            raise ValueError(f"unknown filter {name!r}, expected one of {', '.join(FILTERS)}")
        if name in most:
            raise ValueError(f"filter {name} is repeated; keep one")
        try:
            most[name] = float(number) if equals else FILTERS[name].most
        except ValueError:
            most[name] = float("nan")
        if not 0 <= most[name] <= 1:
            raise ValueError(f"filter {name} has {number!r}, expected a number between 0 and 1")
    return most


def black_part(image: Bytes) -> float:
    """Return the fraction of pixels with no channel above 25."""
    red, green, blue = np.moveaxis(image, -1, 0)  # many times faster than over a dim of 3
    return float((np.maximum(np.maximum(red, green), blue) <= _BLACK).mean())


def white_part(image: Bytes) -> float:
    """Return the fraction of pixels with no channel below 220."""
    red, green, blue = np.moveaxis(image, -1, 0)
    return float((np.minimum(np.minimum(red, green), blue) >= _WHITE).mean())


def pen_part(image: Bytes) -> float:
    """Return the fraction of pixels that look like the ink of a green, blue or black pen.

    Hematoxylin, eosin and DAB have hues from violet over red to brown; only strong blue stains
    would be mistaken for ink. Red ink is not detected, as it looks like blood.
    """
    smooth = Image.fromarray(image).filter(ImageFilter.BoxBlur(2))  # nuclei are not ink
    hue, saturation, value = (np.asarray(band) for band in smooth.convert("HSV").split())
    low, high = (round(degrees * 255 / 360) for degrees in _GREEN_TO_BLUE)
    coloured = (hue >= low) & (hue <= high) & (saturation >= _STRONG) & (value >= _DULL)
    black = (value < _DARK) & (saturation <= _GREY) | (value <= _BLACK)
    return float((coloured | black).mean())


def blur(image: Bytes) -> float:
    """Return the blur of a tile, 0 (sharp) to 1, independent of its contrast.

    It measures how little a tile changes when blurred again: F. Crete et al., "The blur effect",
    Human Vision and Electronic Imaging XII, 2007, section 3 (scikit-image's `blur_effect`).
    """
    grey = np.asarray(Image.fromarray(image).convert("L"), np.float32)
    if min(grey.shape) < 3 or grey.min() == grey.max():
        return 1.0  # without any edge
    return float(np.nan_to_num(blur_effect(grey), nan=1.0))  # type: ignore[no-untyped-call]


FILTERS: Mapping[str, Filter] = {
    "black": Filter(black_part, 0.5),
    "white": Filter(white_part, 0.9),
    "pen": Filter(pen_part, 0.1),
    "blur": Filter(blur, 0.6),
}
