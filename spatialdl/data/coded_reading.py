"""Reads of boxes of compressed chunks: only chunks under a box are decoded, with a cache."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy.typing as npt

from spatialdl.data.chunk_cache import CHUNKS, ChunkCache
from spatialdl.data.chunk_map import MISSING, ChunkMap, ChunkPart, Where
from spatialdl.data.codec import Codec, decode
from spatialdl.data.raw_reading import RawFile

Pixels = npt.NDArray[Any]


def read_coded(
    file: RawFile,
    chunks: ChunkMap,
    codec: Codec,
    out: Pixels,
    where: Where,
    key: Hashable = None,
    cache: ChunkCache = CHUNKS,
) -> None:
    """Decode a non-empty box into `out`.

    Args:
        file: file with the chunks.
        chunks: offsets of the chunks.
        codec: codec of the chunks.
        out: of the box's shape.
        where: the box.
        key: cache key of the dataset in the current state of its file; None bypasses the cache.
        cache: cache of decoded chunks.

    Raises:
        ValueError: there is no such box, or a chunk is missing or damaged; names the chunk.
        OSError: the file cannot be read.
    """
    for part in chunks.parts(where, out.shape):
        known = (key, part.chunk)
        pixels = None if key is None else cache.get(known)
        if pixels is None:
            pixels = _decoded(file, chunks, codec, part)
            if key is not None:
                cache.put(known, pixels)
        out[part.outside] = pixels[part.inside]


def _decoded(file: RawFile, chunks: ChunkMap, codec: Codec, part: ChunkPart) -> Pixels:
    assert chunks.sizes is not None
    try:
        if part.begin == MISSING:
            raise ValueError("it was not written")
        stored = file.stored(part.begin, int(chunks.sizes[part.chunk]))
        return decode(codec, stored, chunks.cell, chunks.dtype)
    except ValueError as error:
        spatial = len(part.inside)
        number, place = part.chunk[:-spatial], part.chunk[-spatial:]
        image = f"image {number[0]}, " if number else ""
        names = ("slice", "row", "column")[-spatial:]
        starts = zip(names, place, chunks.cell, strict=False)
        at = ", ".join(f"{name} {index * each}" for name, index, each in starts)
        raise ValueError(f"chunk at {image}{at}: {error}") from error
