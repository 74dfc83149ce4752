"""What pixels of images and masks may be: their types, their shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

DTYPES = ("uint8", "uint16", "float16", "float32", "float64")
"""Of images. Masks are uint8."""

_ADVICE = {
    "b": "where it is a mask give it as one, else convert it with image.astype('uint8')",
    "i": "convert it to uint8 or uint16 if its values fit, else to float32",
    "u": "convert it to uint16 if its values fit, else to float32 or float64",
    "f": "convert it to float64",
    "c": "give its parts as channels of float32",
}


def image_dtype(given: npt.DTypeLike) -> np.dtype[Any]:
    """The type of which images of a type are stored: the same, in the usual order of bytes.

    Raises:
        ValueError: images are of no such type; says what to do.
    """
    dtype = np.dtype(given)
    if dtype.name not in DTYPES:
        advice = _ADVICE.get(dtype.kind, "convert it first")
        raise ValueError(f"image has type {dtype}, expected one of {', '.join(DTYPES)}; {advice}")
    return dtype.newbyteorder("<")


def as_image(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Check an image and give it its channel dim: (rows, cols, channels).

    Values of floats are nobody's business, NaN and infinities are kept.

    Raises:
        ValueError: a type that is not stored, no 2 or 3 dims, or no pixels.
    """
    dtype = image_dtype(array.dtype)
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise ValueError(
            f"image has shape {array.shape}, expected (rows, cols, channels) or (rows, cols)"
        )
    return np.atleast_3d(array).view(np.ndarray).astype(dtype, copy=False)


def as_mask(array: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Check a mask: integers 0 to 255, (rows, cols) of its image.

    Raises:
        ValueError: another size, no integers, or a value that a byte cannot hold.
    """
    if array.shape != size:
        raise ValueError(f"mask has shape {array.shape}, its image has {size[0]} x {size[1]}")
    if array.dtype == np.uint8:
        return array.view(np.uint8)
    if array.dtype.kind not in "bui":
        raise ValueError(f"mask has type {array.dtype}, expected integers 0 to 255")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 255:
        raise ValueError(f"mask has values {low} to {high}, expected 0 to 255")
    return array.astype(np.uint8)
