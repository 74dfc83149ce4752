"""Writer of tile shards: images of one size, stacked in one dataset per shard."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from spatialdl.data.codec import Coding
from spatialdl.data.format import NO_LABEL, chunk_size, stored_bytes
from spatialdl.data.image_source import as_image, as_mask
from spatialdl.data.jpeg import EncodedImage, JpegStream, check_codec, checked_stream, grid_of
from spatialdl.data.samples import TileSample
from spatialdl.data.shard_file import Chunks, ShardFile, ShardSeries


class TileShards(ShardSeries):
    """Writer of tiles, one shard after the other.

    Args:
        folder: folder of the shards.
        shard_size: maximum bytes of decoded pixels per shard.
        coding: coding of the images.
        chunk: (rows, columns) of an image chunk; None is that of the first tile if it is encoded,
            else 512 x 512 or the whole tile.

    Attributes:
        shape: (rows, columns, channels) of every tile; 0 before the first was added.
    """

    def __init__(
        self,
        folder: Path,
        shard_size: int,
        coding: Coding | None = None,
        chunk: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(folder, shard_size, coding)
        self._chunk = chunk
        self._stacks: dict[str, Chunks] = {}  # datasets of the open file
        self.shape: tuple[int, int, int] = (0, 0, 0)
        self._in_shard: list[TileSample] = []
        self.samples: list[TileSample] = []

    def add(
        self,
        image: npt.NDArray[Any] | EncodedImage,
        mask: npt.NDArray[Any] | None,
        known: dict[str, Any],
    ) -> None:
        """Append one tile; `known` is its label, split, slide, x and y.

        Streams of an encoded tile are stored unchanged, as chunks.

        Raises:
            ValueError: the tile differs from earlier ones, a stream is damaged, or its shape is
                not the chunk's; nothing is added.
        """
        streams: dict[tuple[int, int], JpegStream] = {}
        chunk = self._chunk
        if isinstance(image, EncodedImage):
            check_codec(self._coding.codec)
            (high, wide), (down, across) = image.chunk, grid_of(image)
            places = product(range(down), range(across))
            # All streams are checked before any is stored.
            streams = {(r * high, c * wide): checked_stream(image, r, c) for r, c in places}
            shape, dtype, chunk = image.shape, np.dtype(np.uint8), image.chunk
        else:
            image = as_image(image)
            shape, dtype = image.shape, image.dtype
        classes = None if mask is None else as_mask(mask, shape[:2])
        self._check_same(shape, dtype, classes is not None, chunk)
        file = self._open.get(0) or self._start()
        images = self._stacks["images"]
        number = images.grow()
        if isinstance(image, np.ndarray):
            images.write(image, number=number)
        for (row, col), stream in streams.items():
            images.write_stream(stream, row, col, number)
        self._end_sample(file, classes, known)

    @property
    def channels(self) -> int:
        """Channels of every tile."""
        return self.shape[2]

    @property
    def _capacity(self) -> int:
        each = stored_bytes(self.shape[:2], self.shape[2], self._chunk, self.dtype.itemsize)
        return max(1, self._shard_size // each)

    def _check_same(
        self,
        shape: tuple[int, int, int],
        dtype: np.dtype[Any],
        masked: bool,
        chunk: tuple[int, int] | None,
    ) -> None:
        if None not in (chunk, self._chunk) and chunk != self._chunk:
            raise ValueError(
                f"encoded tile has chunks of {chunk}, the data set has {self._chunk}; "
                "use the same for all tiles, or add this one as pixels"
            )
        if not any(self.shape):
            self._coding.check(shape[2], dtype)
            self.shape, self.dtype, self.masks = shape, dtype, masked
            self._chunk = self._chunk or chunk or chunk_size(*shape[:2])
        if shape != self.shape:
            raise ValueError(
                f"tile has shape {shape}, earlier ones have {self.shape}; tiles are all of one "
                "size (images of any size are kind='regions')"
            )
        if dtype != self.dtype:
            raise ValueError(
                f"tile has type {dtype}, earlier ones have {self.dtype}; all tiles of a data set "
                "have the same type"
            )
        if masked != self.masks:
            raise ValueError("some tiles have masks and others do not; give all of them masks")

    def _start(self, stripe: int = 0) -> ShardFile:
        file = super()._start(stripe)
        rows, cols, channels = self.shape
        usual = chunk_size(rows, cols)
        images = Chunks(
            file.h5,
            "images",
            (rows, cols, channels),
            self._chunk or usual,
            self.dtype,
            stacked=True,
            coding=self._coding,
        )
        self._stacks = {"images": images}
        if self.masks:
            coding = self._coding.of_masks
            self._stacks["masks"] = Chunks(
                file.h5, "masks", (rows, cols), usual, stacked=True, coding=coding
            )
        return file

    def _end_sample(
        self, file: ShardFile, classes: npt.NDArray[np.uint8] | None, known: dict[str, Any]
    ) -> None:
        """Write the mask of a tile, record the tile, and end the shard if it is full."""
        if classes is not None:
            masks = self._stacks["masks"]
            masks.write(classes, number=masks.grow())
        sample = TileSample(shard=file.number, index=file.samples, **known)
        self._in_shard.append(sample)
        self.samples.append(sample)
        file.samples += 1
        if file.samples == self._capacity:
            self._end()

    def _end(self, stripe: int = 0) -> None:
        file = self._open[stripe]
        inside, self._in_shard = self._in_shard, []
        self._stacks = {}
        labels = [NO_LABEL if sample.label is None else sample.label for sample in inside]
        file.h5["coords"] = np.array([(sample.x, sample.y) for sample in inside], np.int64)
        file.h5["labels"] = np.array(labels, np.int64)
        file.h5.create_dataset(
            "slides", data=[sample.slide for sample in inside], dtype=h5py.string_dtype("utf-8")
        )
        super()._end(stripe)
