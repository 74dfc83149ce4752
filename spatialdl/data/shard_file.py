"""One HDF5 file being written: under a temporary name until it is whole and on the disk."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import numpy.typing as npt

from spatialdl.data.format import ShardInfo, sha256_of, shard_name

_PAGE = 4096
_ALIGNED_FROM = 2**17  # bytes; of less the padding would be felt


class ImageRows(Protocol):
    """An image that is read by rows, such as a memory map or a slide: `image[row0:row1]`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, cols, channels) or (rows, cols)."""

    def __getitem__(self, rows: slice, /) -> Any:
        """The rows as an array."""


class ShardFile:
    """A shard in progress.

    Args:
        folder: where it is written.
        number: its place in the manifest, and in its name.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.samples = 0
        self.bytes = 0  # of pixels, as stored
        self._final = folder / shard_name(number)
        self._temporary = self._final.with_suffix(".h5.tmp")
        # windows are copied a tenth faster out of a memory map whose chunks begin with a page
        self.h5 = h5py.File(
            self._temporary, "w", alignment_threshold=_ALIGNED_FROM, alignment_interval=_PAGE
        )

    def finish(self) -> ShardInfo:
        """Close, sync, rename; returns what the manifest says of it."""
        self.h5.close()
        with self._temporary.open("rb+") as file:
            os.fsync(file.fileno())
        self._temporary.rename(self._final)
        size = self._final.stat().st_size
        return ShardInfo(self._final.name, size, sha256_of(self._final), self.samples)

    def abort(self) -> None:
        """Close without keeping anything."""
        with suppress(OSError, RuntimeError):  # a full disk cannot take what is left to write
            self.h5.close()


def as_image(array: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Check an image and give it its channel dim: (rows, cols, channels) uint8.

    Raises:
        ValueError: another type, no 2 or 3 dims, or no pixels.
    """
    if array.dtype != np.uint8:
        raise ValueError(
            f"image has type {array.dtype}, expected uint8 (0 to 255); convert it first"
        )
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise ValueError(
            f"image has shape {array.shape}, expected (rows, cols, channels) or (rows, cols)"
        )
    return np.atleast_3d(array).view(np.uint8)


def as_mask(array: npt.NDArray[np.generic], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
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
