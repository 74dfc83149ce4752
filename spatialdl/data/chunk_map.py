"""Datasets in shards: file offsets of their chunks, from which pixels are copied directly.

A raw chunk is contiguous pixels in the file, a compressed one a stream: reading a box needs only
these offsets from HDF5. They are queried once per dataset (5 microseconds per chunk; a query for a
single chunk by its coordinates makes HDF5 iterate over all chunks).

An HDF5 name can be a link to another file, and a dataset can have its values in other files
(external storage, virtual datasets), so a foreign shard could use any local file as pixels.
spatialdl never writes such, so they are rejected before the other file is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from spatialdl.data.codec import Codec, filters_of

Where = tuple[int | slice, ...]
"""The index of the image in a stack, then spatial dims as slices with start and stop."""
MISSING = -1


class ChunkPart(NamedTuple):
    """The part of a chunk that a box overlaps.

    Attributes:
        chunk: the index of the image in a stack, then the position of the chunk in the chunk grid.
        begin: file offset of the chunk in bytes, `MISSING` if it was never written.
        inside: spatial slices within the chunk.
        outside: spatial slices within the box.
    """

    chunk: tuple[int, ...]
    begin: int
    inside: tuple[slice, ...]
    outside: tuple[slice, ...]


@dataclass(frozen=True)
class ChunkMap:
    """The file offsets of all chunks of a dataset.

    Attributes:
        shape: shape of the dataset, [N,] [slices,] rows, cols[, channels].
        cell: ([slices,] rows, cols[, channels]) of a chunk.
        dtype: type of a pixel.
        offsets: file offset of each chunk in bytes, `MISSING` where there is none;
            ([N,] chunks along each spatial dim).
        sizes: bytes of each chunk; None for raw chunks, which are all equal.
    """

    shape: tuple[int, ...]
    cell: tuple[int, ...]
    dtype: np.dtype[Any]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64] | None = None

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory that the map occupies."""
        return 1000 + self.offsets.nbytes * (1 if self.sizes is None else 2)

    def parts(self, where: Where, out_shape: tuple[int, ...]) -> Iterator[ChunkPart]:
        """The chunks under a non-empty box.

        Raises:
            ValueError: the box is outside the dataset, or `out_shape` is not the box's.
        """
        number = tuple(at for at in where if not isinstance(at, slice))
        cuts = [at for at in where if isinstance(at, slice)]
        self._check(where, number, cuts, out_shape)
        grid = self.offsets[number] if number else self.offsets
        spans = [_spans(cut, step) for cut, step in zip(cuts, self.cell, strict=False)]
        for found in product(*spans):
            place, inside, outside = zip(*found, strict=True)
            yield ChunkPart((*number, *place), grid.item(*place), inside, outside)

    def _check(
        self, where: Where, number: tuple[int, ...], cuts: list[slice], out_shape: tuple[int, ...]
    ) -> None:
        dims = self.offsets.ndim
        sizes, channels = self.shape[len(number) : dims], self.shape[dims:]
        fits = (
            len(where) == dims
            and all(0 <= at < n for at, n in zip(number, self.shape, strict=False))
            and all(0 <= cut.start < cut.stop <= n for cut, n in zip(cuts, sizes, strict=True))
            and out_shape == (*(cut.stop - cut.start for cut in cuts), *channels)
        )
        if not fits:
            raise ValueError(f"its shape is {self.shape}, requested {where} into {out_shape}")


def _spans(cut: slice, step: int) -> list[tuple[int, slice, slice]]:
    """The chunks under a cut along one dim: (number, slice in the chunk, slice in the cut)."""
    spans = []
    for number in range(cut.start // step, (cut.stop - 1) // step + 1):
        at = number * step
        begin, end = max(at, cut.start), min(at + step, cut.stop)
        inside = slice(begin - at, end - at)
        spans.append((number, inside, slice(begin - cut.start, end - cut.start)))
    return spans


def map_chunks(
    dataset: h5py.Dataset,
    stacked: bool,
    file_size: int,
    codec: Codec = "raw",
    spatial: int = 2,
) -> ChunkMap:
    """Map the chunks of an image or a mask, or of a stack of them.

    Args:
        dataset: the dataset.
        stacked: whether its first dim counts images.
        file_size: bytes of its file.
        codec: codec of the chunks.
        spatial: dims of an image, 3 for a volume, without channels.

    Raises:
        ValueError: a chunk lies outside the file or the image, has another size than its pixels,
            or is not of the codec; or the dataset is not chunked along spatial dims only.
    """
    filters = _filters(dataset)
    if not _is_cut_alike(dataset, stacked, spatial):
        raise ValueError(
            f"it has shape {dataset.shape} in chunks {dataset.chunks}, expected chunks of one "
            "image with all channels"
        )
    if filters != filters_of(codec, dataset.dtype):
        raise ValueError(f"it has {dataset.dtype} in filters {filters}, expected codec {codec!r}")
    dims = spatial + stacked
    shape, chunk = dataset.shape, dataset.chunks
    counts = [-(-n // each) for n, each in zip(shape[:dims], chunk[:dims], strict=True)]
    if prod(counts) > file_size:
        raise ValueError(f"its shape is {shape}, whose chunks do not fit in {file_size} bytes")
    offsets, sizes = np.full(counts, MISSING, np.int64), np.zeros(counts, np.int64)
    whole, wrong = prod(chunk) * dataset.dtype.itemsize, []

    def note(info: Any) -> None:
        expected = whole if codec == "raw" else info.size
        inside = 0 < expected == info.size and 0 <= info.byte_offset <= file_size - expected
        place = zip(info.chunk_offset[:dims], chunk[:dims], strict=True)
        at = tuple(begin // each for begin, each in place)
        known = all(number < count for number, count in zip(at, counts, strict=True))
        if info.filter_mask or not (inside and known):
            wrong.append(info)
        else:
            offsets[at], sizes[at] = info.byte_offset, info.size

    _each_chunk(dataset, note)
    if wrong:
        expected = f"{whole if codec == 'raw' else 'a stream'} within {file_size}"
        raise ValueError(f"{_fault(wrong[0], shape)}, expected {expected}")
    cell = chunk[1:] if stacked else chunk
    return ChunkMap(shape, cell, dataset.dtype, offsets, None if codec == "raw" else sizes)


def _fault(info: Any, shape: tuple[int, ...]) -> str:
    """Describe the fault of a chunk."""
    place, mask, begin, has = info
    what = "skipped its filters" if mask else f"has {has} bytes at {begin}"
    if any(at >= most for at, most in zip(place, shape, strict=True)):
        what = f"lies outside of {shape} pixels, and {what}"
    return f"chunk at {place} {what}"


def _each_chunk(dataset: h5py.Dataset, note: Callable[[Any], None]) -> None:
    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(note)
    else:  # older HDF5, which iterates over all chunks for each query
        for number in range(dataset.id.get_num_chunks()):
            note(dataset.id.get_chunk_info(number))


def _filters(dataset: h5py.Dataset) -> list[int]:
    settings = dataset.id.get_create_plist()
    return [settings.get_filter(k)[0] for k in range(settings.get_nfilters())]


def _is_cut_alike(dataset: h5py.Dataset, stacked: bool, spatial: int) -> bool:
    """Whether a chunk has all channels, and belongs to one image."""
    shape, chunk = dataset.shape, dataset.chunks
    more = len(shape) - stacked - spatial
    if chunk is None or more not in (0, 1) or (stacked and chunk[0] != 1):
        return False
    return more == 0 or bool(chunk[-1] == shape[-1])


def own_dataset(h5: h5py.File, name: str) -> h5py.Dataset:
    """Look up a dataset by name.

    Args:
        h5: open file.
        name: full path, such as `regions/000000/image`.

    Raises:
        KeyError: it does not exist.
        ValueError: it is a link, a group, or a dataset with values in other files.
    """
    for part in accumulate(name.split("/"), "{}/{}".format):
        link: Any = h5.get(part, getlink=True)
        if link is None:
            raise KeyError(f"no dataset {part}")
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"{part} is a link, which is not allowed in shards")
        dataset = h5[part]
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{name} is not a dataset")
    settings = dataset.id.get_create_plist()  # the shape may be in other files, too
    if settings.get_layout() == h5py.h5d.VIRTUAL or settings.get_external_count():
        raise ValueError(f"{name} has values in other files, which is not allowed in shards")
    return dataset
