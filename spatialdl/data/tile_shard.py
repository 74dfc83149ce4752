"""Shards of tiles: images of one size, stacked in one dataset a shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from spatialdl.data.format import NO_LABEL, ShardInfo, TileSample, chunk_size, stored_bytes
from spatialdl.data.shard_file import ShardFile, as_image, as_mask


class TileShards:
    """Writes tiles, one shard after the other.

    Args:
        folder: where the shards go.
        shard_size: bytes of pixels after which a shard is full.
    """

    def __init__(self, folder: Path, shard_size: int) -> None:
        self._folder = folder
        self._shard_size = shard_size
        self._infos: list[ShardInfo] = []
        self._file: ShardFile | None = None
        self._stacks: dict[str, _Stack] = {}  # of that file
        self._shape: tuple[int, int, int] | None = None
        self._in_shard: list[TileSample] = []
        self.samples: list[TileSample] = []
        self.masks = False

    @property
    def tile_size(self) -> tuple[int, int]:
        """Rows and columns of every tile; known once one was added."""
        return self._known_shape[:2]

    @property
    def channels(self) -> int:
        """Channels of every tile; known once one was added."""
        return self._known_shape[2]

    def add(
        self,
        image: npt.NDArray[np.generic],
        mask: npt.NDArray[np.generic] | None,
        known: dict[str, Any],
    ) -> None:
        """Append one tile; `known` is its label, split, slide, x and y."""
        pixels = as_image(image)
        rows, cols, channels = pixels.shape
        classes = None if mask is None else as_mask(mask, (rows, cols))
        self._check_same((rows, cols, channels), classes is not None)
        file = self._file or self._start()
        index = file.samples
        self._stacks["images"].append(pixels)
        if classes is not None:
            self._stacks["masks"].append(classes)
        sample = TileSample(shard=file.number, index=index, **known)
        self._in_shard.append(sample)
        self.samples.append(sample)
        file.samples += 1
        if file.samples == self._capacity:
            self._end(file)

    def finish(self) -> list[ShardInfo]:
        """End the last shard; returns all of them."""
        if self._file is not None:
            self._end(self._file)
        return self._infos

    def abort(self) -> None:
        """Close the shard that is open."""
        if self._file is not None:
            self._file.abort()

    @property
    def _known_shape(self) -> tuple[int, int, int]:
        if self._shape is None:
            raise ValueError("no tile was added yet, so their size is not known")
        return self._shape

    @property
    def _capacity(self) -> int:
        return max(1, self._shard_size // stored_bytes(*self._known_shape))

    def _check_same(self, shape: tuple[int, int, int], masked: bool) -> None:
        if self._shape is None:
            self._shape, self.masks = shape, masked
        if shape != self._shape:
            raise ValueError(
                f"tile has shape {shape}, those before it {self._shape}; tiles are all of one "
                "size (images of any size are kind='regions')"
            )
        if masked != self.masks:
            raise ValueError("some tiles have masks and some have none; give all of them one")

    def _start(self) -> ShardFile:
        file = self._file = ShardFile(self._folder, len(self._infos))
        rows, cols, channels = self._known_shape
        chunk = chunk_size(rows, cols)
        self._stacks = {"images": _Stack(file.h5, "images", (rows, cols, channels), chunk)}
        if self.masks:
            self._stacks["masks"] = _Stack(file.h5, "masks", (rows, cols), chunk)
        return file

    def _end(self, file: ShardFile) -> None:
        inside, self._in_shard = self._in_shard, []
        self._stacks = {}
        labels = [NO_LABEL if sample.label is None else sample.label for sample in inside]
        file.h5["coords"] = np.array([(sample.x, sample.y) for sample in inside], np.int64)
        file.h5["labels"] = np.array(labels, np.int64)
        file.h5.create_dataset(
            "slides", data=[sample.slide for sample in inside], dtype=h5py.string_dtype("utf-8")
        )
        self._infos.append(file.finish())
        self._file = None


class _Stack:
    """A stack of arrays of one shape that grows.

    Args:
        h5: where it is made.
        name: of the dataset.
        shape: of an array, (rows, cols, channels) or (rows, cols).
        chunk: rows and columns of a chunk.
    """

    def __init__(
        self, h5: h5py.File, name: str, shape: tuple[int, ...], chunk: tuple[int, int]
    ) -> None:
        self._chunk = (*chunk, *shape[2:])
        # kept: asking HDF5 for it by name takes longer than writing a small tile
        self._data = h5.create_dataset(
            name, (0, *shape), np.uint8, chunks=(1, *self._chunk), maxshape=(None, *shape)
        )
        self._shape = shape
        self._length = 0

    def append(self, array: npt.NDArray[np.uint8]) -> None:
        """Add one array."""
        # one by one: room made ahead would have to be given back, which HDF5 does chunk by chunk
        number, self._length = self._length, self._length + 1
        self._data.id.set_extent((self._length, *self._shape))
        rows, cols = self._chunk[:2]
        for row in range(0, array.shape[0], rows):
            for col in range(0, array.shape[1], cols):
                part = array[row : row + rows, col : col + cols]
                # whole chunks as they will lie in the file: three times as fast as by HDF5
                place = (number, row, col, 0)[: 1 + len(self._shape)]
                self._data.id.write_direct_chunk(place, self._whole(part))

    def _whole(self, part: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """A chunk with this part in its first corner."""
        if part.shape == self._chunk:
            return np.ascontiguousarray(part)
        chunk = np.zeros(self._chunk, np.uint8)
        chunk[: part.shape[0], : part.shape[1]] = part
        return chunk
