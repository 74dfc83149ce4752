"""Contrast stretching of dark pictures for display."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

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
