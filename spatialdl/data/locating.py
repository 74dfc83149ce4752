"""Damaged samples of a shard whose SHA-256 does not match.

A shard has a CRC-32 of the stored chunks of every image and mask, row by row of chunks: for tiles
in `images_crc32` and `masks_crc32`, for bands of regions as attribute `crc32`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from imagecodecs import deflate_crc32  # libdeflate's: ten times as fast as zlib's

from spatialdl.data.chunk_map import MISSING, map_chunks
from spatialdl.data.codec import Codec, Coding
from spatialdl.data.format import Manifest, shard_status
from spatialdl.data.own_dataset import own_dataset
from spatialdl.data.region_shard import region_path
from spatialdl.data.samples import Sample, TileSample

CRC32 = "crc32"
_SHOWN = 5
_READ_ERRORS = (OSError, KeyError, ValueError, RuntimeError, TypeError, IndexError, AttributeError)


def describe_damage(folder: Path, manifest: Manifest, shard: int) -> str:
    """Describe the damage of a shard, as the end of a sentence."""
    inside = [number for number, sample in enumerate(manifest.samples) if _lies_in(sample, shard)]
    try:
        found = damaged_samples(folder, manifest, shard)
    except _READ_ERRORS:
        found = inside
    if not found:
        return "the pixels of its samples are unchanged"
    if len(found) == len(inside) > 1:
        return f"all of its {len(inside)} samples may be damaged: {_named(manifest, found)}"
    return f"damaged: {_named(manifest, found)}"


def damaged_samples(folder: Path, manifest: Manifest, shard: int) -> list[int]:
    """Indices of the samples whose pixels in a shard have changed since they were written.

    Raises:
        OSError: it is no longer an HDF5 file.
        KeyError: it has no checksums, because an earlier spatialdl wrote it.
    """
    path = folder / manifest.shards[shard].file
    size = shard_status(folder, manifest.shards[shard]).st_size
    coding = Coding(manifest.codec)
    codecs: dict[str, Codec] = {"image": coding.codec}
    if manifest.masks:
        codecs["mask"] = coding.of_masks.codec
    damaged = []
    with h5py.File(path, "r", locking=False) as h5, path.open("rb", buffering=0) as file:
        for number, sample in enumerate(manifest.samples):
            if not _lies_in(sample, shard):
                continue
            for what, codec in codecs.items():
                spatial = 2 if isinstance(sample, TileSample) else len(sample.size)
                if not all(
                    _is_whole(h5, file, size, name, index, codec, spatial)
                    for name, index in _datasets(sample, shard, what)
                ):
                    damaged.append(number)
                    break
    return damaged


def _is_whole(
    h5: h5py.File,
    file: Any,
    size: int,
    name: str,
    index: int | None,
    codec: Codec,
    spatial: int,
) -> bool:
    """Whether the chunks of an image are unchanged; `index` is its position in a stack.

    Raises:
        KeyError: there is no checksum.
    """
    try:
        dataset = own_dataset(h5, name)
        apart = f"{name}_{CRC32}"
        if index is None:
            sums = dataset.attrs.get(CRC32)
        else:
            sums = own_dataset(h5, apart) if apart in h5 else None
    except _READ_ERRORS:
        return False
    if sums is None:
        raise KeyError(CRC32)
    try:
        chunks = map_chunks(dataset, index is not None, size, codec, spatial)
        if chunks is None:
            return False
        wanted = int(sums if index is None else sums[index])
        offsets = chunks.offsets if index is None else chunks.offsets[index]
        sizes = np.full(offsets.shape, prod(chunks.cell) * chunks.dtype.itemsize)
        if chunks.sizes is not None:
            sizes = chunks.sizes if index is None else chunks.sizes[index]
        found = 0
        for begin, count in zip(offsets.ravel().tolist(), sizes.ravel().tolist(), strict=True):
            if begin == MISSING:
                return False
            file.seek(begin)
            found = deflate_crc32(file.read(count), value=found)
    except _READ_ERRORS:
        return False
    return found == wanted


def _datasets(sample: Sample, shard: int, what: str) -> Iterator[tuple[str, int | None]]:
    if isinstance(sample, TileSample):
        yield f"{what}s", sample.index
        return
    for number, band in enumerate(sample.bands):
        if band.shard == shard:
            yield region_path(sample, number, what), None


def _lies_in(sample: Sample, shard: int) -> bool:
    if isinstance(sample, TileSample):
        return sample.shard == shard
    return any(band.shard == shard for band in sample.bands)


def _named(manifest: Manifest, numbers: list[int]) -> str:
    named = []
    for number in numbers[:_SHOWN]:
        slide = manifest.samples[number].slide
        named.append(f"sample {number}" + (f" (slide {slide})" if slide else ""))
    more = len(numbers) - _SHOWN
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")
