"""What a data set must offer to be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Box = tuple[int, ...]
"""(row0, row1, col0, col1) of an image, half-open."""

Pixels = npt.NDArray[Any]
"""(rows, columns, channels) of an image, (rows, columns) of a mask."""


class ImageSource(Protocol):
    """`ShardDataset` and `SyntheticDataset` are such; one of your own needs no more than this.

    Attributes:
        labels: int64 (N,), classes; or float64 (N, targets), NaN where nobody knows one.
    """

    labels: npt.NDArray[Any]

    @property
    def has_masks(self) -> bool: ...
    @property
    def channels(self) -> int: ...
    @property
    def classes(self) -> Sequence[str]: ...
    def __len__(self) -> int: ...
    def image_size(self, sample: int) -> tuple[int, int]: ...
    def read(self, sample: int, box: Box | None = None) -> Pixels: ...
    def read_mask(self, sample: int, box: Box | None = None) -> npt.NDArray[np.uint8]: ...
