"""Tissue of a slide: saturated pixels on bright glass, bright ones on a dark background, or a mask.

Masks come from other tools, one image per slide. Dark pictures are contrast-stretched for display.
"""

from __future__ import annotations

import warnings
from math import ceil
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import tifffile
from PIL import Image, ImageFilter
from scipy import ndimage
from skimage.filters import threshold_otsu

from spatialdl.errors import SlideError
from spatialdl.slides.reading.paths import find_beside
from spatialdl.slides.reading.reader import Slide, Thumbnail

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
    bands, noise = Image.fromarray(image).convert("HSV"), ImageFilter.MedianFilter(3)
    saturation, value = (np.asarray(bands.getchannel(name).filter(noise)) for name in "SV")
    return saturation, value


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
    closed = ndimage.grey_closing(padded, 2 * reach + 1)
    return np.asarray(closed[reach:-reach, reach:-reach], bool) | mask


def _smaller(mask: Mask, area: float, *, inner: bool) -> Mask:
    """Mask of pieces with less than `area` pixels; `inner`: only pieces not at the edge."""
    pieces, _ = ndimage.label(mask)
    small = np.bincount(pieces.ravel()) < area
    small[0] = False
    if inner:
        for edge in (pieces[0], pieces[-1], pieces[:, 0], pieces[:, -1]):
            small[edge] = False
    return np.asarray(small[pieces], bool)


SUFFIXES = (".png", ".tif", ".tiff")
_MOST_PIXELS = 2**28  # of a mask, which is read completely
_SAME_SHAPE = 0.01


def find_mask(folder: Path, slide: Path) -> Path:
    """Find the mask of `a.svs`: `a.png` or `a.svs.png` (also .tif, .tiff).

    Raises:
        SlideError: there is no such file, or more than one.
    """
    return find_beside(folder, slide, SUFFIXES, "mask")


def read_mask(path: Path, slide: Slide, thumbnail: Thumbnail) -> Tissue:
    """Read the tissue of a slide from a mask image.

    Pixels that are non-zero (in any channel) and not transparent are tissue. The mask may have any
    resolution; it is averaged over the pixels of the thumbnail, which are tissue from one half.
    In a pyramid the coarsest level that is at least as fine is read.

    Args:
        path: a PNG or TIFF.
        slide: the slide, for its size.
        thumbnail: of the slide.

    Raises:
        SlideError: the file is not such an image, or its aspect ratio is not that of the slide
            (within 1 %, or a pixel).
    """
    rows, cols = thumbnail.missing.shape
    try:
        mask = _read(path, (rows, cols))
    except Image.DecompressionBombError as error:
        raise SlideError(
            f"mask {path} of slide {slide.path} has too many pixels ({error}); make it smaller, "
            "or a TIFF with levels"
        ) from error
    except Exception as error:  # what the libraries raise at damaged files is not documented
        raise SlideError(f"cannot read mask {path} of slide {slide.path}: {error}") from error
    (height, width), (down, across) = mask.shape, slide.size
    if abs(height * across - width * down) > max(_SAME_SHAPE * height * across, across + down):
        raise SlideError(
            f"mask {path} has {height} x {width} pixels, but slide {slide.path} {down} x {across}: "
            "aspect ratios must match; the mask must be of the whole slide, not of a part"
        )
    # padded, since the last pixels of the thumbnail may end beyond the slide and the mask
    bottom, right = rows * thumbnail.scale * height / down, cols * thumbnail.scale * width / across
    more = max(0, ceil(bottom - height)), max(0, ceil(right - width))
    image = Image.fromarray(
        np.pad(mask.astype(np.uint8) * 255, ((0, more[0]), (0, more[1])), "edge")
    )
    box = (0.0, 0.0, right, bottom)
    small = np.asarray(image.resize((cols, rows), Image.Resampling.BOX, box))
    return Tissue(small >= 128, np.zeros((rows, cols), bool), 0.0)


def _read(path: Path, wanted: tuple[int, int]) -> Mask:
    if path.suffix.lower() == ".png":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path, formats=["PNG"]) as image:
                # colours of the palette, not its indices
                mode = "RGBA" if image.has_transparency_data else "RGB"
                return _tissue(np.asarray(image.convert(mode) if image.mode == "P" else image))
    with tifffile.TiffFile(path) as file:
        levels = file.series[0].levels
        fine = [k for k in levels if min(np.divide(k.shape[:2], wanted)) >= 1] or levels[:1]
        if np.prod(fine[-1].shape[:2], dtype=float) > _MOST_PIXELS:
            raise ValueError(
                f"its coarsest fitting level has {fine[-1].shape[:2]} pixels, too many to read; "
                "make it smaller"
            )
        return _tissue(fine[-1].asarray())


def _tissue(pixels: npt.NDArray[np.generic]) -> Mask:
    if pixels.ndim == 3 and pixels.shape[2] in (1, 2, 3, 4):
        solid = pixels[..., -1] != 0 if pixels.shape[2] in (2, 4) else True
        return np.asarray((pixels[..., : 3 if pixels.shape[2] > 2 else 1] != 0).any(-1) & solid)
    if pixels.ndim != 2:
        raise ValueError(f"it has the shape {pixels.shape}, expected (rows, columns[, colours])")
    return np.asarray(pixels != 0)


_DARKEST, _BRIGHTEST = 1.0, 99.5  # percentiles that become black and full
_LEAST = 16.0  # smallest range of grey values that is stretched to 255; less is noise


def stretched(image: Bytes, shown: npt.NDArray[np.bool_] | None = None) -> Bytes:
    """Stretch the colours of a dark picture to the full range, all channels alike.

    Args:
        image: uint8 (rows, cols, 3).
        shown: (rows, cols), mask of pixels that should be bright, such as tissue; None is all.

    Returns:
        uint8 (rows, cols, 3); the unchanged picture if it is already bright, or of one colour.
    """
    values = image.max(-1)
    bright = values if shown is None or not shown.any() else values[shown]
    low, high = np.percentile(values, _DARKEST), np.percentile(bright, _BRIGHTEST)
    if high - low < 1 or 255 - high <= low:
        return image
    factor = 255 / max(high - low, _LEAST)
    return np.asarray(((image - low) * factor).round().clip(0, 255), np.uint8)
