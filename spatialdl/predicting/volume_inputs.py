"""Volumes as images that a network takes, as those of its training set were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spatialdl.data.format import VolumeSample
from spatialdl.data.image_source import Box, Pixels, Size, extents, whole_box
from spatialdl.data.importing.volume_file import StoredVolume, open_volume
from spatialdl.data.pixels import DTYPES
from spatialdl.data.shards import ShardDataset
from spatialdl.data.volume_geometry import VolumeTurn
from spatialdl.errors import SlideError
from spatialdl.predicting.inputs import Input, label_names, region_of
from spatialdl.predicting.trained import Trained
from spatialdl.text import counted


@dataclass
class VolumeImages:
    """One volume, in the orientation of the training set; a data set for `RankLoader`.

    Attributes:
        name: of it, in messages.
        stored: the volume.
        turn: from there to what is read.
        dtype: of the voxels that are read; integers have exactly the values that are stored.
        unreadable: why something could not be read in this process; it is 0.
    """

    name: str
    stored: StoredVolume
    turn: VolumeTurn
    dtype: np.dtype[Any]
    has_masks: bool = False
    classes: Sequence[str] = ()
    unreadable: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.labels = np.zeros(1, np.int64)  # which nobody knows
        self.channels = self.stored.channels

    def __len__(self) -> int:
        return 1

    def image_size(self, sample: int) -> Size:
        return self.turn.seen_size(self.stored.size)

    def read(self, sample: int, box: Box | None = None) -> Pixels:
        """A box (slices, rows, columns, channels); what cannot be read is noted, and 0."""
        size = self.image_size(sample)
        box = whole_box(size) if box is None else box
        try:
            found = self.stored.read(self.turn.stored_box(box, size))
            return self.turn.seen(_exactly(found, self.dtype))
        except Exception as error:  # what decoders raise of damaged files is anything
            self.unreadable[sample] = f"{self.name}: {_said(error)}"
            return np.zeros((*extents(box), self.channels), self.dtype)

    def read_mask(self, sample: int, box: Box | None = None) -> Pixels:
        raise ValueError("volumes that are predicted have no masks")


def volume_input(path: Path, name: str, trained: Trained) -> Input:
    """A file as a network takes it.

    Raises:
        SlideError: it cannot be opened, or does not fit the network.
    """
    try:
        found = open_volume(path)
    except Exception as error:  # what decoders raise of damaged files is anything
        raise SlideError(f"{path}: {_said(error)}") from error
    return _input(found, name, trained, path)


def shard_volume_input(dataset: ShardDataset, number: int, name: str, trained: Trained) -> Input:
    """A sample of a data set as a network takes it.

    Raises:
        SlideError: it does not fit the network.
    """
    found = _input(shard_volume(dataset, number), name, trained, None)
    mask = None
    if dataset.has_masks and isinstance(found.source, VolumeImages):
        mask = partial(_seen_mask, dataset, number, found.source)
    return replace(
        found,
        labels=label_names(dataset, [number]),
        region_of=region_of(dataset, number, name),
        samples=dataset.numbers[[number]].tolist(),
        read_mask=mask,
    )


def _seen_mask(dataset: ShardDataset, number: int, source: VolumeImages, box: Box) -> Pixels:
    """A box of a mask, turned as the volume is."""
    stored = source.turn.stored_box(box, source.image_size(0))
    return source.turn.seen(dataset.read_mask(number, stored))


def shard_volume(dataset: ShardDataset, number: int) -> StoredVolume:
    """A sample of a data set of volumes."""
    sample = dataset.sample(number)
    assert isinstance(sample, VolumeSample)
    affine = None if sample.affine is None else np.array(sample.affine)
    read = partial(dataset.read, number)
    return StoredVolume(sample.size, dataset.channels, dataset.dtype, sample.spacing, affine, read)


def _input(stored: StoredVolume, name: str, trained: Trained, path: Path | None) -> Input:
    """Segmentation takes volumes whole; other tasks see what training has seen, cut or padded."""
    if stored.channels != trained.channels:
        raise SlideError(
            f"{name} has {stored.channels} channels, the network was trained on {trained.channels}"
        )
    dtype = trained.dtype or stored.dtype
    if dtype.name not in DTYPES:
        raise SlideError(f"{name} has voxels of {dtype}, expected one of {', '.join(DTYPES)}")
    turn = trained.geometry.turn(stored.affine)
    source = VolumeImages(name, stored, turn, dtype)
    size = source.image_size(0) if trained.task == "segmentation" else trained.image_size
    spacing = None if stored.spacing is None else turn.seen_size(stored.spacing)
    remark = trained.geometry.remark(spacing)
    span = float(stored.size[1]), float(stored.size[2])
    return Input(name, source, size, [(0, 0)], span, None, None, path, whole=True, remark=remark)


def _said(error: Exception) -> str:
    said = getattr(error, "strerror", None) or " ".join(str(error).split())
    return said or type(error).__name__


def _exactly(voxels: Pixels, dtype: np.dtype[Any]) -> Pixels:
    """Voxels in another type, if it has their values; floats are rounded to other floats.

    Raises:
        ValueError: it has not, or some are no finite numbers.
    """
    if voxels.dtype.kind == "f":
        bad = int(np.size(voxels) - np.isfinite(voxels).sum())
        if bad:
            many = counted(voxels.size, "voxel")
            raise ValueError(
                f"{bad} of {many} that were read are NaN or infinite: replace them, by "
                "numpy.nan_to_num, say"
            )
    with np.errstate(invalid="ignore", over="ignore"):
        found = voxels.astype(dtype, copy=False)
    rounded = voxels.dtype.kind == dtype.kind == "f" and np.isfinite(found).all()
    if not (rounded or np.array_equal(found, voxels)):
        raise ValueError(
            f"it has voxels of {voxels.dtype} from {voxels.min():g} to {voxels.max():g}, which are "
            f"not all values of {dtype}, on which the network was trained: bring it to the units "
            "of the training set"
        )
    return found
