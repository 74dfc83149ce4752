"""Where on a slide tissue is: colourful places, by Otsu's threshold on the saturation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter
from scipy import ndimage
from skimage.filters import threshold_otsu

from spatialdl.slides.reader import Thumbnail

Mask = npt.NDArray[np.bool_]

# Otsu always splits: a slide of glass alone in noise, one of tissue alone in pale and dark.
# Glass is below the first saturation (0 to 255), stained tissue above the second.
_GLASS, _STAINED = 13, 38
_BLACK = 25  # darker than any tissue: borders of the scanned field, where saturation is noise
_SPECK = 16  # pixels of a thumbnail; smaller pieces are dust


class Tissue(NamedTuple):
    """Tissue of a slide.

    `mask` is bool (rows, cols) on the pixels of the thumbnail; what could not be read there is
    not in it. More saturation (0 to 255) than `threshold` is tissue.
    """

    mask: Mask
    threshold: float

    def part_of(self, image: npt.NDArray[np.uint8]) -> float:
        """Part of an image of the same slide, uint8 (rows, cols, 3), that is tissue."""
        return float(_coloured(image, self.threshold).mean())


def find_tissue(thumbnail: Thumbnail) -> Tissue:
    """Mark the tissue of a thumbnail."""
    seen = ~thumbnail.missing
    saturation = _saturation(thumbnail.image)[0][seen]
    threshold = _threshold(saturation) if seen.any() else float(_GLASS)
    return Tissue(_tidied(_coloured(thumbnail.image, threshold) & seen), threshold)


def _coloured(image: npt.NDArray[np.uint8], threshold: float) -> Mask:
    saturation, value = _saturation(image)
    return np.asarray((saturation > threshold) & (value >= _BLACK), bool)


def _saturation(
    image: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Saturation and value, the noise of single pixels taken out."""
    smooth = Image.fromarray(image).convert("HSV").filter(ImageFilter.MedianFilter(3))
    return np.asarray(smooth.getchannel("S")), np.asarray(smooth.getchannel("V"))


def _threshold(saturation: npt.NDArray[np.uint8]) -> float:
    if saturation.min() == saturation.max():
        return _GLASS
    otsu = threshold_otsu(saturation)  # type: ignore[no-untyped-call]
    return float(np.clip(otsu, _GLASS, _STAINED))


def _tidied(tissue: Mask) -> Mask:
    """Close small gaps and drop specks."""
    disc = ndimage.iterate_structure(ndimage.generate_binary_structure(2, 1), 2)
    closed = ndimage.binary_closing(np.pad(tissue, 2, mode="edge"), disc)[2:-2, 2:-2] | tissue
    pieces, _ = ndimage.label(closed)
    large = np.bincount(pieces.ravel()) >= _SPECK
    large[0] = False
    return np.asarray(large[pieces], bool)
