"""Codecs of image chunks in shards: their settings and HDF5 filters.

A compressed chunk names its registered filters (https://github.com/HDFGroup/hdf5_plugins), so a
reader with these plug-ins can read it, and without them HDF5 raises instead of returning streams
as pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from spatialdl.data import jpeg, lossless
from spatialdl.data.jpeg import QUALITY

__all__ = ["CODECS", "LEVEL", "LOSSLESS", "QUALITY", "Codec", "Coding"]

Codec = Literal["raw", "jpeg", "zstd", "lz4"]
"""Raw bytes, a JPEG stream, or losslessly compressed bytes."""

CODECS: tuple[Codec, ...] = get_args(Codec)
LOSSLESS: tuple[Codec, ...] = ("zstd", "lz4")
LEVEL = 3
_LEVELS = range(1, 23)

SHUFFLE, FLETCHER32, JPEG = 2, 3, 32019
_GREY, _COLOUR = 0, 1  # the JPEG filter's names for 1 and 3 channels


@dataclass(frozen=True)
class Coding:
    """A codec with its settings.

    Attributes:
        codec: codec of images.
        quality: JPEG quality, 1 to 100.
        level: zstd level, 1 (fast) to 22 (small).

    Raises:
        ValueError: unknown codec, quality or level.
    """

    codec: Codec = "raw"
    quality: int = QUALITY
    level: int = LEVEL

    def __post_init__(self) -> None:
        """Validate the settings."""
        if self.codec not in CODECS:
            known = ", ".join(map(repr, CODECS))
            raise ValueError(f"codec is {self.codec!r}, expected one of {known}")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality is {self.quality}, expected 1 to 100")
        if self.level not in _LEVELS:
            raise ValueError(f"level is {self.level}, expected 1 to {_LEVELS[-1]}")

    @property
    def of_masks(self) -> Coding:
        """Coding of the masks of such images: classes must be stored losslessly."""
        return self if self.codec in LOSSLESS else Coding()

    def check(self, channels: int, dtype: np.dtype[Any], spatial: int = 2) -> None:
        """Reject images that the codec does not support.

        Raises:
            ValueError: JPEG of volumes, of types other than uint8, or not of 1 or 3 channels.
        """
        if self.codec == "jpeg":
            if spatial != 2:
                raise ValueError(
                    "codec 'jpeg' does not support volumes; use codec='zstd', 'lz4' or 'raw'"
                )
            if dtype != np.uint8:
                raise ValueError(
                    f"image has type {dtype}, but codec 'jpeg' supports only uint8; use "
                    "codec='zstd', 'lz4' or 'raw'"
                )
            jpeg.check_channels(channels)

    def encode(self, chunk: npt.NDArray[Any]) -> bytes | npt.NDArray[Any]:
        """Encode a chunk, (rows, cols, channels) or (rows, cols), for storage."""
        if self.codec == "raw":
            return np.ascontiguousarray(chunk)
        if self.codec == "jpeg":
            return jpeg.encode(chunk, self.quality)
        return lossless.encode(self.codec, chunk, self.level)

    def filters(self, cell: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Any]:
        """Filter arguments of `h5py.File.create_dataset` for chunks of a shape."""
        if self.codec == "raw":
            return {}
        options: tuple[int, ...] = (self.level,) if self.codec == "zstd" else (0,)
        more: dict[str, Any] = {"shuffle": dtype.itemsize > 1, "fletcher32": True}
        if self.codec == "jpeg":
            colours = _GREY if cell[2] == 1 else _COLOUR
            options, more = (self.quality, cell[1], cell[0], colours), {}
        return {
            "compression": filters_of(self.codec, np.dtype(np.uint8))[0],
            "compression_opts": options,
            "allow_unknown_filter": True,
            **more,
        }


def filters_of(codec: Codec, dtype: np.dtype[Any]) -> list[int]:
    """Numbers of the HDF5 filters of a chunk."""
    if codec == "raw":
        return []
    if codec == "jpeg":
        return [JPEG]
    shuffled = [SHUFFLE] if dtype.itemsize > 1 else []
    return [*shuffled, lossless.FILTERS[codec], FLETCHER32]


def decode(
    codec: Codec, stored: npt.NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Decode the pixels of a compressed chunk.

    Raises:
        ValueError: it is damaged, or of another shape.
    """
    if codec == "jpeg":
        rows, cols, channels = shape
        return jpeg.decode(stored.tobytes(), (rows, cols, channels))
    return lossless.decode(codec, stored, shape, dtype)
