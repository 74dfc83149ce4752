"""The interface of data sets for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spatialdl.parallel.layout import spatial_names

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
