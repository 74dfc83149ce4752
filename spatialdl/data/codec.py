"""How the chunks of images lie in shards: the codecs, their settings, and HDF5's names for them.

A chunk that is not raw names the filters that made it, registered ones
(https://github.com/HDFGroup/hdf5_plugins), so that a reader with these plug-ins reads it, and one
without them is refused by HDF5 instead of being given streams for pixels.
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
"""Its bytes as they are, a JPEG stream, or bytes that were compressed without loss."""

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
        codec: of images.
        quality: of JPEGs, 1 to 100.
        level: of zstd, 1 (fast) to 22 (small).

    Raises:
        ValueError: there is no such codec, quality or level.
    """

    codec: Codec = "raw"
    quality: int = QUALITY
    level: int = LEVEL

    def __post_init__(self) -> None:
        """Check them."""
        if self.codec not in CODECS:
            known = ", ".join(map(repr, CODECS))
            raise ValueError(f"codec is {self.codec!r}, expected one of {known}")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality is {self.quality}, expected 1 to 100")
        if self.level not in _LEVELS:
            raise ValueError(f"level is {self.level}, expected 1 to {_LEVELS[-1]}")

    @property
    def of_masks(self) -> Coding:
        """That of the masks beside such images: classes of pixels bear no loss."""
        return self if self.codec in LOSSLESS else Coding()

    def check(self, channels: int, dtype: np.dtype[Any], spatial: int = 2) -> None:
        """Refuse images that the codec does not hold.

        Raises:
            ValueError: JPEG of volumes, of other than bytes, or of other than 1 or 3 channels.
        """
        if self.codec == "jpeg":
            if spatial != 2:
                raise ValueError(
                    "codec 'jpeg' holds images, no volumes; use codec='zstd', 'lz4' or 'raw'"
                )
            if dtype != np.uint8:
                raise ValueError(
                    f"image has type {dtype}, and codec 'jpeg' holds uint8; use codec='zstd', "
                    "'lz4' or 'raw'"
                )
            jpeg.check_channels(channels)

    def encode(self, chunk: npt.NDArray[Any]) -> bytes | npt.NDArray[Any]:
        """A chunk, (rows, cols, channels) or (rows, cols), as it is stored."""
        if self.codec == "raw":
            return np.ascontiguousarray(chunk)
        if self.codec == "jpeg":
            return jpeg.encode(chunk, self.quality)
        return lossless.encode(self.codec, chunk, self.level)

    def filters(self, cell: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Any]:
        """What `h5py.File.create_dataset` is to be told of chunks of a shape."""
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
    """HDF5's numbers of the filters that a chunk went through."""
    if codec == "raw":
        return []
    if codec == "jpeg":
        return [JPEG]
    shuffled = [SHUFFLE] if dtype.itemsize > 1 else []
    return [*shuffled, lossless.FILTERS[codec], FLETCHER32]


def decode(
    codec: Codec, stored: npt.NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """The pixels of a chunk that is not raw.

    Raises:
        ValueError: it is damaged, or of another shape.
    """
    if codec == "jpeg":
        rows, cols, channels = shape
        return jpeg.decode(stored.tobytes(), (rows, cols, channels))
    return lossless.decode(codec, stored, shape, dtype)
