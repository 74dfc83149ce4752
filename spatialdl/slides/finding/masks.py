"""Tissue masks from other tools: one image per slide."""

from __future__ import annotations

import warnings
from math import ceil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tifffile
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.finding.beside import find_beside
from spatialdl.slides.finding.tissue import Mask, Tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail

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
