"""Gaussian blur of a box, which needs a margin of pixels.

Beyond the edge of the augmented image its edge pixels are repeated, regardless of the stored image.
"""

from __future__ import annotations

import math

import numpy as np

from spatialdl.data.augmentation.color import to_type, working_type
from spatialdl.data.image_source import Box, Pixels, Size

_SIGMAS = 3  # radius in standard deviations; 0.3 % of the weight lies beyond
_ROWS_BYTES = 2**22  # of floats at a time


def radius_of(sigma: float) -> int:
    """Radius of the blur kernel in pixels."""
    return math.ceil(_SIGMAS * sigma)


def with_margin(box: Box, size: Size, sigma: float) -> Box:
    """The box to read for blurring a box of an image of `size`."""
    radius = radius_of(sigma)
    row0, row1, col0, col1 = box
    return (
        max(row0 - radius, 0),
        min(row1 + radius, size[0]),
        max(col0 - radius, 0),
        min(col1 + radius, size[1]),
    )


def blur(pixels: Pixels, box: Box, size: Size, sigma: float, white: float | None = None) -> Pixels:
    """Blur a box.

    Args:
        pixels: (rows, cols, channels) of `with_margin(box, size, sigma)`.
        box: half-open box of the image.
        size: (H, W) of the image.
        sigma: standard deviation in pixels; 0 changes nothing.
        white: the largest pixel value; None is that of the type.

    Returns:
        (rows, cols, channels) of `box`, of the same type. A pixel has the same value in every box.
    """
    radius = radius_of(sigma)
    if radius == 0 or pixels.size == 0:
        return pixels
    there = with_margin(box, size, sigma)
    # Pixels missing in the margin at the edges of the image.
    lacking = [
        (radius - (box[0] - there[0]), radius - (there[1] - box[1])),
        (radius - (box[2] - there[2]), radius - (there[3] - box[3])),
    ]
    with np.errstate(over="ignore"):  # for a tiny sigma all weights but the central one are 0
        weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    weights = (weights / weights.sum()).astype(working_type(pixels.dtype))
    rows, cols = box[1] - box[0], box[3] - box[2]
    index = np.clip(np.arange(rows + 2 * radius) - lacking[0][0], 0, len(pixels) - 1)
    result = np.empty((rows, cols, pixels.shape[2]), pixels.dtype)
    step = max(radius, _ROWS_BYTES // max(1, 4 * pixels[0].size), 1)
    for row in range(0, rows, step):
        part = pixels[index[row : row + step + 2 * radius]].astype(weights.dtype)
        part = np.pad(part, ((0, 0), lacking[1], (0, 0)), mode="edge")
        part = _along(part.swapaxes(0, 1), weights).swapaxes(0, 1)
        result[row : row + step] = to_type(_along(part, weights), pixels.dtype, white)
    return result


def _along(values: Pixels, weights: Pixels) -> Pixels:
    """Weighted sums of consecutive rows, added in a fixed order."""
    rows = len(values) - len(weights) + 1
    total = weights[0] * values[:rows]
    for number in range(1, len(weights)):
        total += weights[number] * values[number : number + rows]
    return np.asarray(total)
