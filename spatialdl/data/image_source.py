"""Images: valid types and shapes, boxes, and the interface of data sets for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spatialdl.layout.layout import spatial_names

DTYPES = ("uint8", "uint16", "int16", "float16", "float32", "float64")
"""Types of images. Masks are uint8."""

_ADVICE = {
    "b": "use it as a mask if it is one, else convert it with image.astype('uint8')",
    "i": "convert it to int16 or uint16 if its values fit, else to float32",
    "u": "convert it to uint16 if its values fit, else to float32 or float64",
    "f": "convert it to float64",
    "c": "use real and imaginary parts as channels of float32",
}


def image_dtype(dtype_like: npt.DTypeLike) -> np.dtype[Any]:
    """The type in which images of a type are stored: the same, little-endian.

    Raises:
        ValueError: unsupported type, with what to do.
    """
    dtype = np.dtype(dtype_like)
    if dtype.name not in DTYPES:
        advice = _ADVICE.get(dtype.kind, "convert it first")
        raise ValueError(f"image has type {dtype}, expected one of {', '.join(DTYPES)}; {advice}")
    return dtype.newbyteorder("<")


def image_shape(shape: Sequence[int], spatial: int = 2) -> tuple[int, ...]:
    """The shape of an image or volume, with a channel dim appended if missing.

    Args:
        shape: (rows, cols[, channels]), or (slices, rows, cols[, channels]).
        spatial: number of dims without channels, 2 or 3.

    Raises:
        ValueError: another number of dims, or no pixels.
    """
    sizes = tuple(int(n) for n in shape)
    if len(sizes) not in (spatial, spatial + 1) or 0 in sizes:
        dims = "rows, cols" if spatial == 2 else "slices, rows, cols"
        what = "image" if spatial == 2 else "volume"
        raise ValueError(f"{what} has shape {sizes}, expected ({dims}, channels) or ({dims})")
    return sizes if len(sizes) > spatial else (*sizes, 1)


def as_image(array: npt.NDArray[Any], spatial: int = 2) -> npt.NDArray[Any]:
    """Check an image and append a missing channel dim: ([slices,] rows, cols, channels).

    Float values are not validated; NaN and infinities are kept.

    Raises:
        ValueError: an unsupported type, another number of dims, or no pixels.
    """
    dtype = image_dtype(array.dtype)
    shape = image_shape(array.shape, spatial)
    return array.view(np.ndarray).reshape(shape).astype(dtype, copy=False)


def as_mask(array: npt.NDArray[Any], size: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Check a mask: integers 0 to 255, of the size of its image.

    Raises:
        ValueError: another size, not integers, or values out of range.
    """
    if array.shape != size:
        raise ValueError(
            f"mask has shape {array.shape}, its image has {' x '.join(map(str, size))}"
        )
    if array.dtype == np.uint8:
        return array.view(np.uint8)
    if array.dtype.kind not in "bui":
        raise ValueError(f"mask has type {array.dtype}, expected integers 0 to 255")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 255:
        raise ValueError(f"mask has values {low} to {high}, expected 0 to 255")
    return array.astype(np.uint8)


Box = tuple[int, ...]
"""(row0, row1, col0, col1) of an image, half-open; of a volume with leading (slice0, slice1)."""

Pixels = npt.NDArray[Any]
"""(rows, columns, channels) of an image, (rows, columns) of a mask; volumes with leading slices."""

Size = tuple[int, ...]
"""([slices,] rows, columns)."""


def pairs(box: Box) -> list[tuple[int, int]]:
    """(Start, stop) of each spatial dim."""
    return list(zip(box[::2], box[1::2], strict=True))


def extents(box: Box) -> tuple[int, ...]:
    """The size of a box."""
    return tuple(stop - start for start, stop in pairs(box))


def whole_box(size: Sequence[int]) -> Box:
    """The box of a whole image."""
    return tuple(number for n in size for number in (0, n))


def check_box(box: Box, size: Sequence[int], what: str) -> None:
    """Check that a box is inside an image.

    Raises:
        ValueError: it is not, or has other dims; names the image as `what`.
    """
    if len(box) == 2 * len(size):
        spans = pairs(box)
        if all(0 <= start <= stop <= n for (start, stop), n in zip(spans, size, strict=True)):
            return
        named = zip(spatial_names(len(size)), spans, strict=True)
        shown = ", ".join(f"{name} {start}:{stop}" for name, (start, stop) in named)
    else:
        shown = f"{tuple(box)}"
    raise ValueError(f"box {shown} is not inside {what} of {' x '.join(map(str, size))}")


class ImageSource(Protocol):
    """Interface of an image data set, such as `ShardDataset`, `SyntheticDataset` or a user's.

    Attributes:
        labels: int64 (N,), classes; or float64 (N, targets), NaN where unknown.
    """

    labels: npt.NDArray[Any]

    @property
    def has_masks(self) -> bool: ...
    @property
    def channels(self) -> int: ...
    @property
    def classes(self) -> Sequence[str]: ...
    def __len__(self) -> int: ...
    def image_size(self, sample: int) -> Size: ...
    def read(self, sample: int, box: Box | None = None) -> Pixels: ...
    def read_mask(self, sample: int, box: Box | None = None) -> npt.NDArray[np.uint8]: ...
