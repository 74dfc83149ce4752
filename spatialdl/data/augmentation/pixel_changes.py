"""Colour and stain jitter, pixel by pixel, and Gaussian blur.

A rank has only its box, so nothing here depends on the whole image: contrast changes about a fixed
grey. Sums are written out in a fixed order, so a pixel has the same value in every box. A blur
needs a margin of pixels; beyond the edge of the augmented image its edge pixels are repeated,
regardless of the stored image.

Stain jitter: D. Tellez et al., "Whole-slide mitosis detection in H&E breast histology using PHH3
as a reference to train distilled stain-invariant convolutional networks", IEEE Transactions on
Medical Imaging 37(9), 2018, section III; stains by A. Ruifrok and D. Johnston, "Quantification of
histochemical staining by color deconvolution", Analytical and Quantitative Cytology and Histology
23(4), 2001, table 2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.data.augmentation.geometry import Draw
from spatialdl.data.image_source import Box, Pixels, Size

GREY = 0.5
"""Centre of contrast changes."""

DARKEST = 1 / 255
"""Lower limit of light (white is 1) for densities, because 0 has none."""

Matrix = npt.NDArray[np.float64]

_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
_YIQ = np.array([_LUMA, [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
# Optical densities of hematoxylin, eosin and DAB in red, green and blue.
_STAINS = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
_STAINS /= np.linalg.norm(_STAINS, axis=1, keepdims=True)
_SIGMAS = 3  # radius in standard deviations; 0.3 % of the weight lies beyond
_ROWS_BYTES = 2**22  # of floats at a time


def recolour(pixels: Pixels, draw: Draw, white: float | None = None) -> Pixels:
    """Change stain, then hue, saturation, contrast and brightness as drawn; clip to the range.

    Args:
        pixels: (rows, cols, channels), from 0 to `white`.
        white: None is the largest value of an integer type, 1 for floats.

    Returns:
        A new array of the same type, or `pixels` if nothing was drawn.
    """
    changes = _stain_change(draw), _colour_change(draw, pixels.shape[-1])
    if changes == (None, None) or pixels.size == 0:
        return pixels
    result = np.empty(pixels.shape, pixels.dtype)
    scale = value_range(pixels.dtype) if white is None else white
    step = max(1, _ROWS_BYTES // max(1, 4 * pixels[0].size))
    for row in range(0, len(pixels), step):
        part = pixels[row : row + step].astype(working_type(pixels.dtype)) / scale
        if changes[0] is not None:
            density = -np.log10(np.maximum(part, DARKEST))
            part = np.power(10, -_affine(density, *changes[0]), dtype=part.dtype)
        if changes[1] is not None:
            part = _affine(part, *changes[1])
        result[row : row + step] = to_type(part * scale, pixels.dtype, scale)
    return result


def value_range(dtype: np.dtype[Any]) -> int:
    """The value of white: the maximum of an integer type, 1 for floats."""
    return int(np.iinfo(dtype).max) if np.issubdtype(dtype, np.integer) else 1


def working_type(dtype: np.dtype[Any]) -> type[np.floating]:
    """The float type for computation."""
    return np.float64 if dtype.itemsize > 4 else np.float32


def to_type(values: Pixels, dtype: np.dtype[Any], white: float | None = None) -> Pixels:
    """Convert floats to a pixel type: clipped to [0, white (default: of the type)], rounded."""
    values = np.clip(values, 0, value_range(dtype) if white is None else white)
    return (np.rint(values) if np.issubdtype(dtype, np.integer) else values).astype(dtype)


def _colour_change(draw: Draw, channels: int) -> tuple[Matrix, Matrix] | None:
    """A matrix (channels, channels) and an offset (channels,) that combine all linear changes."""
    if (draw.hue, draw.saturation, draw.contrast, draw.brightness) == (0, 1, 1, 1):
        return None
    gain = draw.contrast * draw.brightness
    offset = np.full(channels, GREY * (1 - draw.contrast) * draw.brightness)
    if (draw.hue, draw.saturation) == (0, 1):
        return np.eye(channels) * gain, offset
    angle = 2 * math.pi * draw.hue
    turn = np.eye(3)
    turn[1:, 1:] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    hue = np.linalg.inv(_YIQ) @ turn @ _YIQ
    grey = np.tile(_LUMA, (3, 1))
    saturation = draw.saturation * np.eye(3) + (1 - draw.saturation) * grey
    return gain * saturation @ hue, offset


def _stain_change(draw: Draw) -> tuple[Matrix, Matrix] | None:
    """The affine change of the optical densities of red, green and blue."""
    if draw.stain is None:
        return None
    factors, added = (np.array(values) for values in draw.stain)
    return (np.linalg.inv(_STAINS) @ np.diag(factors) @ _STAINS).T, added @ _STAINS


def _affine(values: Pixels, matrix: Matrix, offset: Matrix) -> Pixels:
    result = np.empty_like(values)
    for channel, weights in enumerate(matrix.astype(values.dtype)):
        total = np.full(values.shape[:-1], offset[channel], values.dtype)
        for other in np.flatnonzero(weights):
            total += weights[other] * values[..., other]
        result[..., channel] = total
    return result


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
