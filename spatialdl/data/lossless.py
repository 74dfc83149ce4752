"""Lossless compression of chunks by zstd or LZ4, compatible with HDF5's filters.

Bytes of multi-byte items are shuffled first (all first bytes, all second bytes ...), HDF5's shuffle
filter. A fletcher32 checksum is appended, because neither zstd frames nor LZ4 blocks detect a
flipped bit.
"""

from __future__ import annotations

from math import prod
from typing import Any

import imagecodecs
import numpy as np
import numpy.typing as npt

_codecs: Any = imagecodecs  # its annotations do not cover arrays
Bytes = npt.NDArray[np.uint8]
FILTERS = {"zstd": 32015, "lz4": 32004}
_SUM = 4  # bytes of the checksum


def encode(codec: str, chunk: npt.NDArray[Any], level: int) -> bytes:
    """Compress a chunk.

    Args:
        codec: "zstd" or "lz4".
        chunk: numbers of any shape and type.
        level: zstd level.
    """
    flat = _shuffled(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8), chunk.dtype.itemsize)
    if codec == "zstd":
        packed = bytes(_codecs.zstd_encode(flat, level=level))
    else:
        packed = bytes(_codecs.lz4h5_encode(flat))
    return packed + _checksum(packed)


def decode(
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
    return _unshuffled(flat, dtype.itemsize).view(dtype).reshape(shape)


def _checksum(packed: bytes | Bytes) -> bytes:
    return int(_codecs.h5checksum_fletcher32(packed)).to_bytes(_SUM, "little")


def _shuffled(flat: Bytes, size: int) -> Bytes:
    if size == 1:
        return flat
    # One byte of all items at a time: several times as fast as a transposed copy.
    items, out = flat.reshape(-1, size), np.empty((size, len(flat) // size), np.uint8)
    for number in range(size):
        out[number] = items[:, number]
    return out.reshape(-1)


def _unshuffled(flat: Bytes, size: int) -> Bytes:
    if size == 1:
        return flat
    planes, out = flat.reshape(size, -1), np.empty((len(flat) // size, size), np.uint8)
    for number in range(size):
        out[:, number] = planes[number]
    return out.reshape(-1)
