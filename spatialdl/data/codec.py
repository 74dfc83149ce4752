"""Codecs of image chunks in shards: their settings and HDF5 filters.

A compressed chunk names its registered filters (https://github.com/HDFGroup/hdf5_plugins), so a
reader with these plug-ins can read it, and without them HDF5 raises instead of returning streams
as pixels.

Before zstd and LZ4, bytes of multi-byte items are shuffled (all first bytes, all second bytes ...),
HDF5's shuffle filter. A fletcher32 checksum is appended, because neither zstd frames nor LZ4 blocks
detect a flipped bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

import imagecodecs
import numpy as np
import numpy.typing as npt

from spatialdl.data import jpeg
from spatialdl.data.jpeg import QUALITY

__all__ = ["CODECS", "LEVEL", "LOSSLESS", "QUALITY", "Codec", "Coding"]

Codec = Literal["raw", "jpeg", "zstd", "lz4"]
"""Raw bytes, a JPEG stream, or losslessly compressed bytes."""

CODECS: tuple[Codec, ...] = get_args(Codec)
LOSSLESS: tuple[Codec, ...] = ("zstd", "lz4")
LEVEL = 3
_LEVELS = range(1, 23)

_codecs: Any = imagecodecs  # its annotations do not cover arrays
Bytes = npt.NDArray[np.uint8]
FILTERS = {"zstd": 32015, "lz4": 32004}
_SUM = 4  # bytes of the checksum

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
        return encode_lossless(self.codec, chunk, self.level)

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
    return [*shuffled, FILTERS[codec], FLETCHER32]


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
    return decode_lossless(codec, stored, shape, dtype)


def encode_lossless(codec: str, chunk: npt.NDArray[Any], level: int) -> bytes:
    """Compress a chunk.

    Args:
        codec: "zstd" or "lz4".
        chunk: numbers of any shape and type.
        level: zstd level.
    """
    flat: npt.NDArray[Any] = np.ascontiguousarray(chunk).reshape(-1)
    if flat.itemsize > 1:
        flat = _codecs.byteshuffle_encode(flat.view(f"u{flat.itemsize}"), axis=0)
    flat = flat.view(np.uint8)
    if codec == "zstd":
        packed = bytes(_codecs.zstd_encode(flat, level=level))
    else:
        packed = bytes(_codecs.lz4h5_encode(flat))
    return packed + _checksum(packed)


def decode_lossless(
    codec: str, stored: Bytes, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Decompress a chunk of known shape and type, never to more bytes than that.

    Raises:
        ValueError: it is damaged, or of another size.
    """
    packed, expected = stored[:-_SUM], stored[-_SUM:].tobytes()
    if len(packed) == 0 or _checksum(packed) != expected:
        raise ValueError(f"checksum mismatch in its {len(stored)} bytes")
    flat = np.empty(prod(shape) * dtype.itemsize, np.uint8)
    unpack = _codecs.zstd_decode if codec == "zstd" else _codecs.lz4h5_decode
    try:
        count = len(unpack(packed, out=flat))
    except RuntimeError as error:  # base class of imagecodecs' errors
        raise ValueError(f"cannot decompress: {error}") from error
    if count != len(flat):
        raise ValueError(f"it has {count} bytes, expected {len(flat)}")
    if dtype.itemsize > 1:
        flat = _codecs.byteshuffle_decode(flat.view(f"u{dtype.itemsize}"), axis=0)
    return flat.view(dtype).reshape(shape)


def _checksum(packed: bytes | Bytes) -> bytes:
    return int(_codecs.h5checksum_fletcher32(packed)).to_bytes(_SUM, "little")
