"""Shards of regions: images of any size, up to whole slides, each a group in one shard or more.

A region is written some rows at a time, so it may be larger than memory. Striped over S shards
it becomes S row bands, each a dataset of its own in another shard, so that the ranks that read
the rows of one region read different files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

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
        shard_size: bytes of pixels after which a shard is full.
        stripes: shards over which the row bands of a region are spread.
    """

    def __init__(self, folder: Path, shard_size: int, stripes: int) -> None:
        self._folder = folder
        self._shard_size = shard_size
        self._stripes = stripes
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
        self, image: ImageRows, mask: ImageRows | None, mpp: float | None, known: dict[str, Any]
    ) -> None:
        """Append one region; `known` is its label, split, slide, x and y."""
        height, width, channels = _shape(image)
        if mask is not None and tuple(mask.shape) != (height, width):
            raise ValueError(f"mask has shape {mask.shape}, its image has {height} x {width}")
        self._check_same(channels, mask is not None)
        files = self._open or self._start()
        first = len(self.samples) % self._stripes  # spreads regions that have few bands
        bands = tuple(
            Band(files[(first + number) % self._stripes].number, row0, rows)
            for number, (row0, rows) in enumerate(_bands(height, self._stripes))
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
                _write_band(by_number[band.shard], sample, number, image, mask)
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


def region_path(sample: RegionSample, number: int, what: str = "image") -> str:
    """Name of the dataset of band `number` of a region, inside the band's shard."""
    whole = f"regions/{sample.id}/{what}"
    return f"{whole}/{number:05d}" if sample.striped else whole


def _bands(height: int, stripes: int) -> list[tuple[int, int]]:
    """First row and number of rows of each band: whole chunks, except in the last."""
    rows = height if stripes == 1 else -(-height // (stripes * CHUNK)) * CHUNK
    return [(row0, min(rows, height - row0)) for row0 in range(0, height, rows)]


def _shape(image: ImageRows) -> tuple[int, int, int]:
    shape = tuple(int(n) for n in image.shape)
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(
            f"image has shape {shape}, expected (rows, cols, channels) or (rows, cols)"
        )
    return (shape[0], shape[1], shape[2] if len(shape) == 3 else 1)


def _write_band(
    file: ShardFile, sample: RegionSample, number: int, image: ImageRows, mask: ImageRows | None
) -> None:
    band, width = sample.bands[number], sample.width
    channels = _shape(image)[2]
    group = file.h5.require_group(f"regions/{sample.id}")
    _describe(group, sample)
    chunk = chunk_size(band.rows, width)
    pixels = _dataset(file.h5, region_path(sample, number), (band.rows, width, channels), chunk)
    pixels.attrs["row0"] = band.row0
    classes = None
    if mask is not None:
        classes = _dataset(file.h5, region_path(sample, number, "mask"), (band.rows, width), chunk)
        classes.attrs["row0"] = band.row0
    for row in range(0, band.rows, CHUNK):
        end = min(row + CHUNK, band.rows)
        rows = slice(band.row0 + row, band.row0 + end)
        part = as_image(np.asarray(image[rows]))
        if part.shape != (end - row, width, channels):
            raise ValueError(f"image gave rows of shape {part.shape} where it has width {width}")
        pixels[row:end] = part
        if mask is not None and classes is not None:
            classes[row:end] = as_mask(np.asarray(mask[rows]), (end - row, width))
    file.bytes += stored_bytes(band.rows, width, channels)


def _dataset(
    h5: h5py.File, name: str, shape: tuple[int, ...], chunk: tuple[int, int]
) -> h5py.Dataset:
    return h5.create_dataset(name, shape, np.uint8, chunks=(*chunk, *shape[2:]))


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
