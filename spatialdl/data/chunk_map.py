"""Where the chunks of a dataset lie in their file, so that pixels are copied straight from there.

A raw chunk is its pixels, one after the other, at one place of the file, a coded one a stream:
reading a box needs nothing of HDF5 but these places. They are asked for once a dataset (5
microseconds a chunk; asking for single chunks by their coordinates takes HDF5 a walk over all of
them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from spatialdl.data.codec import Codec, filters_of

Where = tuple[int | slice, ...]
"""The number of the image in a stack, then spatial dims as slices with start and stop."""
MISSING = -1


class ChunkPart(NamedTuple):
    """What a box has of a chunk.

    Attributes:
        chunk: the number of the image in a stack, then the place of the chunk in the grid of
            chunks.
        begin: byte of the file at which it begins, `MISSING` if it was never written.
        inside: its spatial dims in the chunk.
        outside: in the box.
    """

    chunk: tuple[int, ...]
    begin: int
    inside: tuple[slice, ...]
    outside: tuple[slice, ...]


@dataclass(frozen=True)
class ChunkMap:
    """The places of all chunks of a dataset.

    Attributes:
        shape: of the dataset, [N,] [slices,] rows, cols[, channels].
        cell: ([slices,] rows, cols[, channels]) of a chunk.
        dtype: of a pixel.
        offsets: byte of the file at which each chunk begins, `MISSING` where there is none;
            ([N,] chunks along each spatial dim).
        sizes: bytes of each chunk; None where they are raw, and all alike.
    """

    shape: tuple[int, ...]
    cell: tuple[int, ...]
    dtype: np.dtype[Any]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64] | None = None

    @property
    def nbytes(self) -> int:
        """Of the memory that it takes."""
        return self.offsets.nbytes * (1 if self.sizes is None else 2)

    def parts(self, where: Where, out_shape: tuple[int, ...]) -> Iterator[ChunkPart]:
        """The chunks under a box that is not empty.

        Raises:
            ValueError: the dataset has no such box, or `out_shape` is not the box's.
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
            raise ValueError(f"its shape is {self.shape}, where {where} is wanted in {out_shape}")


def _spans(cut: slice, step: int) -> list[tuple[int, slice, slice]]:
    """The chunks under a cut along one dim: number, what of the chunk, and where in the cut."""
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
) -> ChunkMap | None:
    """Find the chunks of an image or a mask, or of a stack of them.

    Args:
        dataset: the one to be mapped.
        stacked: its first dim counts images.
        file_size: bytes of its file.
        codec: of the chunks.
        spatial: dims of an image, 3 of a volume, without channels.

    Returns:
        None where HDF5 has to read it: chunks are to be raw, and it is not cut into such along
        spatial dims alone, has filters, or the bytes of its numbers lie in another order.

    Raises:
        ValueError: a chunk lies outside the file or the image, or has another size than its pixels,
            or they are not of the codec.
    """
    filters = _filters(dataset)
    fits = _is_cut_alike(dataset, stacked, spatial) and filters == filters_of(codec, dataset.dtype)
    if codec == "raw":
        if not fits or not dataset.dtype.isnative or not hasattr(dataset.id, "chunk_iter"):
            return None
    elif not fits:
        raise ValueError(f"it has {dataset.dtype} in filters {filters}, expected codec {codec!r}")
    dims = spatial + stacked
    shape, chunk = dataset.shape, dataset.chunks
    counts = [-(-n // each) for n, each in zip(shape[:dims], chunk[:dims], strict=True)]
    if prod(counts) > file_size:
        raise ValueError(f"its shape is {shape}, and {file_size} bytes have no such chunks")
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
        raise ValueError(f"{_told(wrong[0], shape)}, expected {expected}")
    cell = chunk[1:] if stacked else chunk
    return ChunkMap(shape, cell, dataset.dtype, offsets, None if codec == "raw" else sizes)


def _told(info: Any, shape: tuple[int, ...]) -> str:
    """What is wrong with a chunk."""
    place, mask, begin, has = info
    what = "did not go through its filters" if mask else f"has {has} bytes at {begin}"
    if any(at >= most for at, most in zip(place, shape, strict=True)):
        what = f"lies outside of {shape} pixels, and {what}"
    return f"chunk at {place} {what}"


def _each_chunk(dataset: h5py.Dataset, note: Callable[[Any], None]) -> None:
    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(note)
    else:  # an older HDF5, which walks over all chunks for each
        for number in range(dataset.id.get_num_chunks()):
            note(dataset.id.get_chunk_info(number))


def _filters(dataset: h5py.Dataset) -> list[int]:
    settings = dataset.id.get_create_plist()
    return [settings.get_filter(k)[0] for k in range(settings.get_nfilters())]


def _is_cut_alike(dataset: h5py.Dataset, stacked: bool, spatial: int) -> bool:
    """Whether a chunk has all channels of a box of one image."""
    shape, chunk = dataset.shape, dataset.chunks
    more = len(shape) - stacked - spatial
    if chunk is None or more not in (0, 1) or (stacked and chunk[0] != 1):
        return False
    return more == 0 or bool(chunk[-1] == shape[-1])
