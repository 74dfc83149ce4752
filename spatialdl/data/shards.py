"""Data set reader: any box of any sample, reading only the chunks under it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from spatialdl.data.chunk_map import Where
from spatialdl.data.codec import Coding
from spatialdl.data.format import NO_LABEL, Manifest, shard_problem
from spatialdl.data.image_source import Box, Pixels, Size, check_box, extents, pairs, whole_box
from spatialdl.data.open_shards import OpenShard, OpenShards
from spatialdl.data.region_shard import region_path
from spatialdl.data.samples import RegionBand, RegionSample, Sample, TileSample, VolumeSample
from spatialdl.errors import ShardError

_UNREADABLE = (OSError, KeyError, TypeError, ValueError, RuntimeError, IndexError, OverflowError)


class ShardDataset(Dataset[tuple[Pixels, int]]):
    """The samples of a data set folder, or of one split of it.

    Files are opened on first read, once per process: the data set can be pickled and used after a
    fork. They are opened without locking, and HDF5 requires the same of every handle in a process:
    another `h5py.File` on a shard needs `locking=False` too, or `close` before it.

    Args:
        path: the folder, with `manifest.json` in it.
        split: keep the samples of this split only; None keeps all.
        whole: whether all shards must exist with the length in the manifest; if false, a missing
            shard raises when it is read.

    Attributes:
        manifest: the table of contents of the folder.
        kind: "tiles" (all of one size), "regions" or "volumes".
        channels: of every image.
        mpp: micrometres per pixel of the tiles, if known.
        codec: codec of the images in the shards: raw, jpeg, zstd or lz4.
        dtype: type of image pixels: uint8, uint16, int16 or a float type; masks are uint8.
        classes: names of the classes; a label is an index into them, or -1 for none.
        has_masks: whether every sample has a mask.

    Raises:
        ShardError: the folder is missing, incomplete, or of an unknown version.
        ValueError: the split has no samples.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        split: str | None = None,
        *,
        whole: bool = True,
    ) -> None:
        self.path = Path(path).absolute()
        self.split = split
        manifest = self.manifest = Manifest.load(self.path)
        self.kind, self.channels, self.mpp = manifest.kind, manifest.channels, manifest.mpp
        self.codec, self.dtype = manifest.codec, np.dtype(manifest.dtype)
        self.classes, self.has_masks = list(manifest.classes), manifest.masks
        if whole:
            _check_sizes(self.path, manifest)
        samples = manifest.samples
        if split is not None:
            samples = [sample for sample in samples if sample.split == split]
            if not samples:
                known = (
                    ", ".join(self.manifest.splits)
                    or "none; use all samples with split=None (data.split=null for training)"
                )
                raise ValueError(f"data set {path} has no split {split!r}; its splits: {known}")
        self._samples = samples
        self.labels: npt.NDArray[np.int64] = np.array(
            [NO_LABEL if sample.label is None else sample.label for sample in samples], np.int64
        )
        self._shards = OpenShards(self.path)

    @property
    def splits(self) -> list[str]:
        """Splits of the folder."""
        return self.manifest.splits

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._samples)

    def __getitem__(self, sample: int) -> tuple[Pixels, int]:
        """The whole image ([slices,] rows, cols, channels) and its label."""
        return self.read(sample), int(self.labels[self._number(sample)])

    def __iter__(self) -> Iterator[tuple[Pixels, int]]:
        """All samples in order."""
        return (self[sample] for sample in range(len(self)))

    def sample(self, sample: int) -> Sample:
        """Manifest entry of a sample: slide, coordinates, split, location."""
        return self._samples[self._number(sample)]

    @cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """Indices of the samples of this split among those of all splits."""
        samples = self.manifest.samples
        split = self.split
        return np.flatnonzero([split is None or sample.split == split for sample in samples])

    def volumes(self) -> list[VolumeSample]:
        """Manifest entries of all samples of a data set of volumes."""
        return [sample for sample in self._samples if isinstance(sample, VolumeSample)]

    def image_size(self, sample: int) -> Size:
        """(Rows, columns) of a sample; of a volume (slices, rows, columns)."""
        found = self.sample(sample)
        if isinstance(found, TileSample):
            assert self.manifest.tile_size is not None  # checked when the manifest was loaded
            return self.manifest.tile_size
        return found.size

    def read(self, sample: int, box: Box | None = None) -> Pixels:
        """Read a box of an image.

        Args:
            sample: its index; negative indices count from the end.
            box: half-open (row0, row1, col0, col1), of a volume with leading (slice0, slice1);
                may be empty; None is the whole image.

        Returns:
            ([slice1 - slice0,] row1 - row0, col1 - col0, channels) of `dtype`. Only the chunks
            that the box overlaps are read, and decoded if compressed.

        Raises:
            IndexError: the sample index is out of range.
            ValueError: the box is not inside the image.
            ShardError: the shard is missing or damaged.
        """
        box = self._checked_box(sample, box)
        out = self._allocate((*extents(box), self.channels), self.dtype)
        self._fill(out, self.sample(sample), "image", box)
        return out

    def read_mask(self, sample: int, box: Box | None = None) -> npt.NDArray[np.uint8]:
        """Read a box of a mask: uint8 without channels, otherwise as `read`.

        Raises:
            ValueError: the data set has no masks.
        """
        if not self.has_masks:
            raise ValueError(f"data set {self.path} has no masks")
        box = self._checked_box(sample, box)
        out = self._allocate(extents(box), np.dtype(np.uint8))
        self._fill(out, self.sample(sample), "mask", box)
        return out

    def shards_under(self, sample: int, box: Box) -> tuple[int, ...]:
        """Numbers of the shards that hold a box of a sample, in reading order."""
        if min(extents(box)) <= 0:
            return ()
        found = self.sample(sample)
        if isinstance(found, TileSample):
            return (found.shard,)
        return tuple(band.shard for _, band, _, _ in _bands(found, box[0], box[1]))

    def use_copies(self, folder: Path | None) -> None:
        """Read shards from this folder once they are staged there, see `spatialdl.data.staging`."""
        self._shards.local = folder

    def verify(self) -> None:
        """Read every shard and compare its SHA-256 with the manifest.

        Raises:
            ShardError: with every damaged shard, and the indices of its samples in the folder.
        """
        wrong = [
            f"{info.file} {problem} ({self.manifest.describe_samples(number)})"
            for number, info in enumerate(self.manifest.shards)
            if (problem := shard_problem(self.path, info))
        ]
        if wrong:
            raise ShardError(
                f"data set {self.path}: {'; '.join(wrong)}; copy or write the data set again"
            )

    def close(self) -> None:
        """Close the shards; they are reopened on the next read."""
        self._shards.close()

    def _number(self, sample: int) -> int:
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} is out of range for {len(self)} samples")
        return sample % len(self)

    def _checked_box(self, sample: int, box: Box | None) -> Box:
        size = self.image_size(sample)
        if box is None:
            return whole_box(size)
        check_box(box, size, f"sample {sample}")
        return box

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Pixels:
        try:
            return np.empty(shape, dtype)
        except (MemoryError, ValueError) as error:
            raise ShardError(
                f"cannot allocate a box of shape {shape} of data set {self.path} ({error}); "
                "read smaller boxes, or check whether the manifest is damaged"
            ) from error

    def _fill(self, out: Pixels, found: Sample, what: str, box: Box) -> None:
        if out.size == 0:
            return
        (row0, row1), *others = pairs(box)
        cuts = [slice(start, stop) for start, stop in others]
        if isinstance(found, TileSample):
            where: Where = (found.index, slice(row0, row1), *cuts)
            self._read_into(out, found.shard, what, what + "s", where)
            return
        for number, band, first, last in _bands(found, row0, row1):
            rows = slice(first - band.row0, last - band.row0)
            part = out[first - row0 : last - row0]
            name = region_path(found, number, what)
            self._read_into(part, band.shard, what, name, (rows, *cuts))

    def _read_into(
        self, out: Pixels, shard: int, what: str, name: str, where: tuple[int | slice, ...]
    ) -> None:
        info = self.manifest.shards[shard]
        try:
            opened = self._shards.get(info)
            try:
                self._copy_box(opened, out, what, name, where)
            except _UNREADABLE as error:
                if not opened.is_local:
                    raise
                self._shards.distrust(info, error)
                self._copy_box(self._shards.get(info), out, what, name, where)
        except _UNREADABLE as error:
            if isinstance(error, ShardError):
                raise
            raise ShardError(
                f"cannot read {name} from {self.path / info.file}: {error}; "
                "the shard is damaged or not of this data set, copy or write it again"
            ) from error

    def _copy_box(
        self, opened: OpenShard, out: Pixels, what: str, name: str, where: tuple[int | slice, ...]
    ) -> None:
        codec = self.codec if what == "image" else Coding(self.codec).of_masks.codec
        with self._shards.reading(opened):
            opened.read(name, out, where, codec)


def _bands(
    region: RegionSample, row0: int, row1: int
) -> Iterator[tuple[int, RegionBand, int, int]]:
    """The bands with rows of a region: (number, band, first row, row after the last)."""
    for number, band in enumerate(region.bands):
        first, last = max(row0, band.row0), min(row1, band.row0 + band.rows)
        if first < last:
            yield number, band, first, last


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    for info in manifest.shards:
        if problem := shard_problem(folder, info, contents=False):
            raise ShardError(
                f"data set {folder}: {info.file} {problem}; copy or write the data set again"
            )
