"""Tissue detection: saturated pixels on bright glass, bright pixels on a dark background."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage
from skimage.filters import threshold_otsu

from spatialdl.slides.reading.reader import Thumbnail
from spatialdl.slides.stretching import stretched

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Background = Literal["auto", "bright", "dark"]
BACKGROUNDS: tuple[Background, ...] = ("auto", "bright", "dark")

# Limits for Otsu's threshold, which also splits slides of only glass or only tissue: saturation
# (0 to 255) of glass is below the first, that of stained tissue above the second.
_GLASS, _STAINED = 13, 38
_BLACK = 25  # darker than any tissue: borders of the scanned field, where saturation is noise
# limits for fluorescence: values of camera noise are below the first, those of cells above
_NOISE, _GLOWING = 10, 50
_WHITE = 200

# fractions of the thumbnail or of its tissue, to be independent of the size of slides
_GAP = 1 / 500  # of the longer side; gaps up to twice this are closed
_SPECK, _SPECK_OF_TISSUE = 1e-4, 1e-3  # areas below which pieces are dust
_HOLE_OF_TISSUE = 2e-3  # area below which holes (lumens, vessels, fat) are filled
_SEEN = 16  # pixels of a thumbnail; smaller pieces are noise at any size


class Tissue(NamedTuple):
    """Tissue of a slide.

    `mask` is bool (rows, cols) on the pixels of the thumbnail; unreadable pixels are `unknown` and
    not in `mask`. Saturation (0 to 255) above `threshold` is tissue; on a `dark` background it is
    brightness.
    """

    mask: Mask
    unknown: Mask
    threshold: float
    dark: bool = False

    def part_of(self, image: Bytes) -> float:
        """Return the fraction of tissue in an image of the slide, uint8 (rows, cols, 3)."""
        return float(_standing_out(*_channels(image), self.threshold, self.dark).mean())

    def shown(self, image: Bytes) -> Bytes:
        """Return an image of the slide for display, contrast-stretched if the slide is dark."""
        return stretched(image, image.max(-1) > self.threshold) if self.dark else image


def find_tissue(thumbnail: Thumbnail, background: Background = "auto") -> Tissue:
    """Find the tissue of a thumbnail.

    Applies Otsu's threshold to the saturation (on a dark background, to the logarithm of the
    brightness), closes gaps, fills holes of up to 0.2 % of the tissue, and drops pieces of less
    than 0.1 % of the tissue or 0.01 % of the slide.

    Args:
        thumbnail: of the whole slide.
        background: "bright" (stained tissue on glass), "dark" (fluorescence), or "auto": dark
            if more than half of the slide is dark and less than half of the rest is glass.
    """
    seen = thumbnail.seen
    saturation, value = _channels(thumbnail.image)
    dark = background == "dark" or (
        background == "auto" and _is_dark(saturation[seen], value[seen])
    )
    threshold = _threshold((value if dark else saturation)[seen], dark)
    mask = _standing_out(saturation, value, threshold, dark) & seen
    return Tissue(_tidied(mask) & seen, thumbnail.missing, threshold, dark)


def _channels(image: Bytes) -> tuple[Bytes, Bytes]:
    """Saturation and value, median-filtered against noise of single pixels."""
    bands = Image.fromarray(image).convert("HSV")
    saturation, value = (_median(np.asarray(bands.getchannel(name))) for name in "SV")
    return saturation, value


def _median(band: Bytes) -> Bytes:
    """Median of 3 x 3 pixels: sorts columns, then takes the median of the remaining candidates.

    Several times faster than the filters of libraries, which support any size.
    """
    padded = np.pad(band, 1, mode="edge")
    a, b, c = padded[:-2], padded[1:-1], padded[2:]
    low, high = np.minimum(a, b), np.maximum(a, b)
    middle = np.maximum(low, np.minimum(high, c))
    low, high = np.minimum(low, c), np.maximum(high, c)
    highest_low = np.maximum(np.maximum(low[:, :-2], low[:, 1:-1]), low[:, 2:])
    lowest_high = np.minimum(np.minimum(high[:, :-2], high[:, 1:-1]), high[:, 2:])
    between = _middle(middle[:, :-2], middle[:, 1:-1], middle[:, 2:])
    return _middle(highest_low, between, lowest_high)


def _middle(a: Bytes, b: Bytes, c: Bytes) -> Bytes:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _standing_out(saturation: Bytes, value: Bytes, threshold: float, dark: bool) -> Mask:
    if dark:
        return np.asarray(value > threshold, bool)
    return np.asarray((saturation > threshold) & (value >= _BLACK), bool)


def _is_dark(saturation: Bytes, value: Bytes) -> bool:
    lit = value >= _GLOWING
    if not value.size or 2 * lit.sum() >= value.size:
        return False
    # glass means a bright slide in a wide black frame
    glass = (value >= _WHITE) & (saturation <= _STAINED)
    return bool(2 * glass.sum() <= lit.sum())


def _threshold(values: Bytes, dark: bool) -> float:
    low, high = (_NOISE, _GLOWING) if dark else (_GLASS, _STAINED)
    if not values.size or values.min() == values.max():
        return low
    # logarithm: few bright cells of a dark slide would raise the threshold above the faint ones
    scaled = np.log1p(values.astype(np.float32)) if dark else values
    otsu = float(threshold_otsu(scaled))  # type: ignore[no-untyped-call]
    return float(np.clip(np.expm1(otsu) if dark else otsu, low, high))


def _tidied(tissue: Mask) -> Mask:
    """Close small gaps, fill small holes and drop specks."""
    closed = _closed(tissue, max(1, round(max(tissue.shape) * _GAP)))
    area = np.count_nonzero(closed)
    filled = closed | _smaller(~closed, max(_SEEN, _HOLE_OF_TISSUE * area), inner=True)
    speck = max(_SEEN, _SPECK * tissue.size, _SPECK_OF_TISSUE * area)
    return np.asarray(filled & ~_smaller(filled, speck, inner=False), bool)


def _closed(mask: Mask, reach: int) -> Mask:
    """Morphological closing by a square, separable, so that its cost is independent of `reach`."""
    padded = np.pad(mask.astype(np.uint8), reach, mode="edge")
    for step in (ndimage.maximum_filter1d, ndimage.minimum_filter1d):
        for axis in (0, 1):
            padded = step(padded, 2 * reach + 1, axis)
    return np.asarray(padded[reach:-reach, reach:-reach], bool) | mask


def _smaller(mask: Mask, area: float, *, inner: bool) -> Mask:
    """Mask of pieces with less than `area` pixels; `inner`: only pieces not at the edge."""
    pieces, _ = ndimage.label(mask)
    small = np.bincount(pieces.ravel()) < area
    small[0] = False
    if inner:
        for edge in (pieces[0], pieces[-1], pieces[:, 0], pieces[:, -1]):
            small[edge] = False
    return np.asarray(small[pieces], bool)
