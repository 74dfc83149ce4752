"""Shards of regions: images of any size, up to whole slides, each a group in one shard or more.

A region is written some rows at a time, so it may be larger than memory. Striped over S shards
it becomes S row bands, each a dataset of its own in another shard, so that the ranks that read
the rows of one region read different files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from spatialdl.data.chunks import Chunks
from spatialdl.data.codec import QUALITY, Codec, check_channels
from spatialdl.data.encoded import EncodedImage, checked_stream, grid_of
from spatialdl.data.format import (
    CHUNK,
    NO_LABEL,
    Band,
    RegionSample,
    ShardInfo,
    chunk_size,
    stored_bytes,
)
from spatialdl.data.shard_file import ImageRows, ShardFile, as_image, as_mask


class RegionShards:
    """Writes regions to a set of `stripes` shards, and starts the next set when one is full.

    Args:
        folder: where the shards go.
        shard_size: bytes of pixels after which a shard is full, as many as they are decoded.
        stripes: shards over which the row bands of a region are spread.
        codec: of the images.
        quality: of JPEGs made here.
    """

    def __init__(
        self,
        folder: Path,
        shard_size: int,
        stripes: int,
        codec: Codec = "raw",
        quality: int = QUALITY,
    ) -> None:
        self._folder = folder
        self._shard_size = shard_size
        self._stripes = stripes
        self._codec: Codec = codec
        self._quality = quality
        self._infos: list[ShardInfo] = []
        self._open: list[ShardFile] = []
        self._channels: int | None = None
        self.samples: list[RegionSample] = []
        self.masks = False

    @property
    def channels(self) -> int:
        """Channels of every region; known once one was added."""
        if self._channels is None:
            raise ValueError("no region was added yet, so their channels are not known")
        return self._channels

    def add(
        self,
        image: ImageRows | EncodedImage,
        mask: ImageRows | None,
        mpp: float | None,
        known: dict[str, Any],
    ) -> None:
        """Append one region; `known` is its label, split, slide, x and y.

        The streams of one that is encoded are stored as they are, each region with its own chunks.
        """
        height, width, channels = _shape(image)
        if isinstance(image, EncodedImage):
            if self._codec != "jpeg":
                raise ValueError("image is encoded, and codec is 'raw'; use codec='jpeg'")
            grid_of(image)
        if mask is not None and tuple(mask.shape) != (height, width):
            raise ValueError(f"mask has shape {mask.shape}, its image has {height} x {width}")
        self._check_same(channels, mask is not None)
        files = self._open or self._start()
        first = len(self.samples) % self._stripes  # spreads regions that have few bands
        bands = tuple(
            Band(files[(first + number) % self._stripes].number, row0, rows)
            for number, (row0, rows) in enumerate(_bands(height, self._stripes, _step(image)))
        )
        sample = RegionSample(
            id=f"{len(self.samples):06d}",
            height=height,
            width=width,
            mpp=mpp,
            striped=self._stripes > 1,
            bands=bands,
            **known,
        )
        by_number = {file.number: file for file in files}
        try:
            for number, band in enumerate(bands):
                file, codec = by_number[band.shard], self._codec
                write_band(file, sample, number, image, mask, codec, self._quality)
        except BaseException:
            for file in files:  # leave no half of it behind
                file.h5.pop(f"regions/{sample.id}", None)
            raise
        for number in {band.shard for band in bands}:
            by_number[number].samples += 1
        self.samples.append(sample)
        if any(file.bytes >= self._shard_size for file in files):
            self._end()

    def finish(self) -> list[ShardInfo]:
        """End the last shards; returns all of them."""
        self._end()
        return self._infos

    def abort(self) -> None:
        """Close the shards that are open."""
        for file in self._open:
            file.abort()

    def _check_same(self, channels: int, masked: bool) -> None:
        if self._channels is None:
            if self._codec == "jpeg":
                check_channels(channels)
            self._channels, self.masks = channels, masked
        if channels != self._channels:
            raise ValueError(
                f"region has {channels} channels, those before it {self._channels}; "
                "all regions of a data set have the same"
            )
        if masked != self.masks:
            raise ValueError("some regions have masks and some have none; give all of them one")

    def _start(self) -> list[ShardFile]:
        first = len(self._infos)
        self._open = [ShardFile(self._folder, first + k) for k in range(self._stripes)]
        return self._open

    def _end(self) -> None:
        while self._open:
            self._infos.append(self._open.pop(0).finish())


def write_band(
    file: ShardFile,
    sample: RegionSample,
    number: int,
    image: ImageRows | EncodedImage,
    mask: ImageRows | None = None,
    codec: Codec = "raw",
    quality: int = QUALITY,
) -> None:
    """Write band `number` of a region into a shard.

    Args:
        file: open for writing.
        sample: the region.
        number: of the band.
        image: the whole region; only the rows of the band are asked for.
        mask: of the whole region.
        codec, quality: of the image.

    Raises:
        ValueError: the image gives rows of another shape.
    """
    band, width = sample.bands[number], sample.width
    channels = _shape(image)[2]
    _describe(file.h5.require_group(f"regions/{sample.id}"), sample)
    usual = chunk_size(band.rows, width)
    chunk = image.chunk if isinstance(image, EncodedImage) else usual
    name, shape = region_path(sample, number), (band.rows, width, channels)
    pixels = Chunks(file.h5, name, shape, chunk, codec=codec, quality=quality)
    pixels.dataset.attrs["row0"] = band.row0
    if isinstance(image, EncodedImage):
        _copy_streams(image, pixels, band)
    else:
        _copy_rows(image, pixels, band, lambda part: _checked_image(part, width, channels))
    if mask is not None:
        classes = Chunks(file.h5, region_path(sample, number, "mask"), (band.rows, width), usual)
        classes.dataset.attrs["row0"] = band.row0
        _copy_rows(mask, classes, band, lambda part: as_mask(part, (len(part), width)))
    file.bytes += stored_bytes(band.rows, width, channels, chunk)


def region_path(sample: RegionSample, number: int, what: str = "image") -> str:
    """Name of the dataset of band `number` of a region, inside the band's shard."""
    whole = f"regions/{sample.id}/{what}"
    return f"{whole}/{number:05d}" if sample.striped else whole


def _step(image: ImageRows | EncodedImage) -> int:
    """Bands of an image begin at multiples of so many rows."""
    return image.chunk[0] if isinstance(image, EncodedImage) else CHUNK


def _bands(height: int, stripes: int, step: int) -> list[tuple[int, int]]:
    """First row and number of rows of each band: whole chunks, except in the last."""
    rows = height if stripes == 1 else -(-height // (stripes * step)) * step
    return [(row0, min(rows, height - row0)) for row0 in range(0, height, rows)]


def _shape(image: ImageRows | EncodedImage) -> tuple[int, int, int]:
    shape = tuple(int(n) for n in image.shape)
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(
            f"image has shape {shape}, expected (rows, cols, channels) or (rows, cols)"
        )
    return (shape[0], shape[1], shape[2] if len(shape) == 3 else 1)


def _copy_streams(image: EncodedImage, chunks: Chunks, band: Band) -> None:
    """Store the streams of a band."""
    (high, wide), across = image.chunk, grid_of(image)[1]
    for row in range(0, band.rows, high):
        for col in range(across):
            stream = checked_stream(image, (band.row0 + row) // high, col)
            chunks.write_stream(stream, row, col * wide)


def _copy_rows(
    image: ImageRows, chunks: Chunks, band: Band, check: Callable[[Any], npt.NDArray[np.uint8]]
) -> None:
    """Store the rows of a band, a row of chunks at a time."""
    for row in range(0, band.rows, CHUNK):
        end = min(row + CHUNK, band.rows)
        part = check(np.asarray(image[band.row0 + row : band.row0 + end]))
        if len(part) != end - row:
            raise ValueError(f"image gave {len(part)} rows where {end - row} were asked for")
        chunks.write(part, row)


def _checked_image(
    part: npt.NDArray[np.generic], width: int, channels: int
) -> npt.NDArray[np.uint8]:
    pixels = as_image(part)
    if pixels.shape[1:] != (width, channels):
        raise ValueError(f"image gave rows of shape {pixels.shape} where it has width {width}")
    return pixels


def _describe(group: h5py.Group, sample: RegionSample) -> None:
    group.attrs.update(
        height=sample.height,
        width=sample.width,
        slide=sample.slide,
        x=sample.x,
        y=sample.y,
        label=NO_LABEL if sample.label is None else sample.label,
    )
    if sample.mpp is not None:
        group.attrs["mpp"] = sample.mpp
