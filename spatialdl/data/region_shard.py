"""Writer of region shards: images up to whole slides, each a group in one or more shards.

A region is written in bands of rows, so it may be larger than memory. A striped region becomes row
bands, each a separate dataset in another shard, so that ranks that read different rows of a region
read different files. A volume is a region with an additional leading dim: what holds for rows here
holds for its slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from spatialdl.data.codec import Coding
from spatialdl.data.format import NO_LABEL, chunk_size, stored_bytes, volume_chunk
from spatialdl.data.image_source import as_image, as_mask, image_dtype, image_shape
from spatialdl.data.jpeg import EncodedImage, check_codec, checked_stream, grid_of
from spatialdl.data.samples import RegionBand, RegionSample, VolumeSample
from spatialdl.data.shard_file import Chunks, ImageRows, ShardFile, ShardSeries
from spatialdl.layout.layout import even_bounds


class OtherTypeError(ValueError):
    """A region whose type or number of channels differs from earlier ones."""


class RegionShards(ShardSeries):
    """Writer of regions; band k of each region goes to the shards of stripe k.

    A rank that reads the same rows of all regions needs the shards of one or two stripes,
    regardless of the number of regions. A stripe continues in a new shard when one is full.

    Args:
        folder: folder of the shards.
        shard_size: maximum bytes of decoded pixels per shard, exceeded only by a single band.
        stripes: number of row bands per region.
        coding: coding of the images.
        prefix: prefix of region names.
        spatial: number of dims of a region, 3 for volumes.

    Attributes:
        channels: channels of every region; 0 before the first was added.
    """

    def __init__(
        self,
        folder: Path,
        shard_size: int,
        stripes: int,
        coding: Coding | None = None,
        prefix: str = "",
        spatial: int = 2,
    ) -> None:
        super().__init__(folder, shard_size, coding)
        self._spatial, self._stripes, self._prefix = spatial, stripes, prefix
        self.channels = 0
        self.samples: list[RegionSample] = []

    def add(
        self,
        image: ImageRows | EncodedImage,
        mask: ImageRows | None,
        mpp: float | None,
        known: dict[str, Any],
    ) -> None:
        """Append one region; `known` is its label, split, slide, x and y.

        Streams of an encoded region are stored unchanged, with the region's own chunk size.
        For volumes `known` also has the spacing and the affine.
        """
        *size, _ = image_shape(image.shape, self._spatial)
        self._check(image, mask)
        step = image.chunk[0] if isinstance(image, EncodedImage) else 1
        cuts = cut_rows(size[0], self._stripes, step)
        files = [
            self._file(stripe, _band_bytes(image, (end - row0, *size[1:]), self._striped))
            for stripe, (row0, end) in enumerate(cuts)
        ]
        made: type[RegionSample] = RegionSample
        if self._spatial == 3:
            made, known = VolumeSample, {"depth": size[0], **known}
        sample = made(
            id=f"{self._prefix}{len(self.samples):06d}",
            height=size[-2],
            width=size[-1],
            mpp=mpp,
            striped=self._striped,
            bands=tuple(
                RegionBand(file.number, row0, end - row0)
                for file, (row0, end) in zip(files, cuts, strict=True)
            ),
            **known,
        )
        self._write(files, sample, image, mask)
        for file in files:
            file.samples += 1
        self.samples.append(sample)

    def _check(self, image: ImageRows | EncodedImage, mask: ImageRows | None) -> None:
        *size, channels = image_shape(image.shape, self._spatial)
        if isinstance(image, EncodedImage):
            check_codec(self._coding.codec)
            grid_of(image)
        if mask is not None and tuple(mask.shape) != tuple(size):
            shown = " x ".join(map(str, size))
            raise ValueError(f"mask has shape {mask.shape}, its image has {shown}")
        self._check_same(channels, _dtype_of(image), mask is not None)

    def _write(
        self,
        files: list[ShardFile],
        sample: RegionSample,
        image: ImageRows | EncodedImage,
        mask: ImageRows | None,
    ) -> None:
        """Write each band into its file, or none of them on error."""
        before = [file.bytes for file in files]
        try:
            for number, file in enumerate(files):
                write_band(file, sample, number, image, mask, self._coding)
        except BaseException:
            for file, size in zip(files, before, strict=True):  # remove partial bands
                file.h5.pop(f"regions/{sample.id}", None)
                file.bytes = size
            raise

    @property
    def _striped(self) -> bool:
        return self._stripes > 1

    def _check_same(self, channels: int, dtype: np.dtype[Any], masked: bool) -> None:
        if not self.samples:  # one that could not be stored decides nothing
            self._coding.check(channels, dtype, self._spatial)
            self.channels, self.dtype, self.masks = channels, dtype, masked
        if (channels, dtype) != (self.channels, self.dtype):
            raise OtherTypeError(
                f"it has {channels} channels of {dtype}, earlier ones have "
                f"{self.channels} of {self.dtype}; a data set has one type, so convert it"
            )
        if masked != self.masks:
            raise ValueError("some regions have masks and others do not; give all of them masks")

    def _file(self, stripe: int, more: int) -> ShardFile:
        """The open shard of a stripe with room for `more` bytes, or a new one."""
        file = self._open.get(stripe)
        if file is not None and file.samples and file.bytes + more > self._shard_size:
            self._end(stripe)
            file = None
        return self._start(stripe) if file is None else file


def write_band(
    file: ShardFile,
    sample: RegionSample,
    number: int,
    image: ImageRows | EncodedImage,
    mask: ImageRows | None = None,
    coding: Coding | None = None,
) -> None:
    """Write band `number` of a region into a shard.

    Args:
        file: shard open for writing.
        sample: the region.
        number: index of the band.
        image: the whole region; only the rows of the band are read.
        mask: mask of the whole region.
        coding: coding of the image.

    Raises:
        ValueError: the image returns rows of another shape or type.
    """
    coding = coding or Coding()
    band = sample.bands[number]
    size = (band.rows, *sample.size[1:])
    shape = (*size, image_shape(image.shape, len(size))[-1])
    dtype = _dtype_of(image)
    _describe(file.h5.require_group(f"regions/{sample.id}"), sample)
    usual = _band_chunk(size, sample.striped)
    chunk = image.chunk if isinstance(image, EncodedImage) else usual
    name = region_path(sample, number)
    pixels = Chunks(file.h5, name, shape, chunk, dtype, coding=coding)
    pixels.dataset.attrs["row0"] = band.row0
    if isinstance(image, EncodedImage):
        _copy_streams(image, pixels, band)
    else:
        _copy_rows(image, pixels, band, usual[0], lambda p: _checked(p, shape, dtype))
    if mask is not None:
        name = region_path(sample, number, "mask")
        classes = Chunks(file.h5, name, size, usual, coding=coding.of_masks)
        classes.dataset.attrs["row0"] = band.row0
        _copy_rows(mask, classes, band, usual[0], lambda p: as_mask(p, (len(p), *size[1:])))
    file.bytes += _band_bytes(image, size, sample.striped)


def cut_rows(height: int, bands: int, multiple: int = 1) -> list[tuple[int, int]]:
    """(First row, row after the last) of bands that are as even as possible.

    With `multiple` 1 they match the rows of the ranks of a grid with `bands` rows.

    Args:
        height: total number of rows.
        bands: number of bands; fewer if `height` has fewer multiples.
        multiple: each band starts at a multiple of this.
    """
    units = even_bounds(-(-height // multiple), bands)
    starts = sorted({unit * multiple for unit in units[:-1]})
    return list(pairwise([*starts, height]))


def region_path(sample: RegionSample, number: int, what: str = "image") -> str:
    """Name of the dataset of band `number` of a region, inside the band's shard."""
    whole = f"regions/{sample.id}/{what}"
    return f"{whole}/{number:05d}" if sample.striped else whole


def _band_chunk(size: Sequence[int], striped: bool) -> tuple[int, ...]:
    """Chunk of any image; bands use the largest row count that ends with a whole chunk."""
    if len(size) == 3:
        return volume_chunk(size)
    rows, cols = size
    high, wide = chunk_size(rows, cols)
    if striped:
        high = -(-rows // -(-rows // high))
    return high, wide


def _band_bytes(image: ImageRows | EncodedImage, size: Sequence[int], striped: bool) -> int:
    chunk = _band_chunk(size, striped)
    if isinstance(image, EncodedImage):
        chunk = image.chunk
    channels = image_shape(image.shape, len(size))[-1]
    return stored_bytes(size, channels, chunk, _dtype_of(image).itemsize)


def _dtype_of(image: ImageRows | EncodedImage) -> np.dtype[Any]:
    return image_dtype(getattr(image, "dtype", np.uint8))


def _copy_streams(image: EncodedImage, chunks: Chunks, band: RegionBand) -> None:
    """Store the streams of a band."""
    (high, wide), across = image.chunk, grid_of(image)[1]
    for row in range(0, band.rows, high):
        for col in range(across):
            stream = checked_stream(image, (band.row0 + row) // high, col)
            chunks.write_stream(stream, row, col * wide)


def _copy_rows(
    image: ImageRows,
    chunks: Chunks,
    band: RegionBand,
    at_once: int,
    check: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
) -> None:
    """Store the rows of a band, a row of chunks at a time."""
    for row in range(0, band.rows, at_once):
        end = min(row + at_once, band.rows)
        part = check(np.asarray(image[band.row0 + row : band.row0 + end]))
        if len(part) != end - row:
            raise ValueError(f"image returned {len(part)} rows, expected {end - row}")
        chunks.write(part, row)


def _checked(
    part: npt.NDArray[Any], shape: Sequence[int], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    pixels = as_image(part, len(shape) - 1)
    if pixels.shape[1:] != tuple(shape[1:]):
        raise ValueError(
            f"image returned rows of shape {pixels.shape}, expected {tuple(shape[1:])} per row"
        )
    if pixels.dtype != dtype:
        raise ValueError(
            f"image returned rows of {pixels.dtype}, expected {dtype}; give it a `dtype`"
        )
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
    if isinstance(sample, VolumeSample):
        group.attrs["depth"] = sample.depth
        for name, value in (("spacing", sample.spacing), ("affine", sample.affine)):
            if value is not None:
                group.attrs[name] = value
