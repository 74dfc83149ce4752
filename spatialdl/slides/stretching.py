"""Dark pictures made bright enough to be looked at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_DARKEST, _BRIGHTEST = 1.0, 99.5  # percentiles that become black and full
_LEAST = 16.0  # levels of grey that are spread over all: less is noise


def stretched(image: Bytes, shown: npt.NDArray[np.bool_] | None = None) -> Bytes:
    """Spread the colours of a dark picture over all that can be shown, all channels alike.

    Args:
        image: uint8 (rows, cols, 3).
        shown: (rows, cols), the pixels that are to be bright, such as tissue; None is all.

    Returns:
        uint8 (rows, cols, 3); the picture itself where it is bright already, or of one colour.
    """
    values = image.max(-1)
    bright = values if shown is None or not shown.any() else values[shown]
    low, high = np.percentile(values, _DARKEST), np.percentile(bright, _BRIGHTEST)
    if high - low < 1 or 255 - high <= low:
        return image
    factor = 255 / max(high - low, _LEAST)
    return np.asarray(((image - low) * factor).round().clip(0, 255), np.uint8)
