"""Volumes as network inputs, in the geometry of the training set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spatialdl.common.text import counted
from spatialdl.data.image_source import DTYPES, Box, Pixels, Size, extents, whole_box
from spatialdl.data.importing.volume_file import StoredVolume, open_volume
from spatialdl.data.samples import VolumeSample
from spatialdl.data.shards import ShardDataset
from spatialdl.data.volume_geometry import VolumeTurn
from spatialdl.errors import SlideError
from spatialdl.inference.predicting.inputs import Input, label_names, region_of
from spatialdl.inference.predicting.trained import Trained


@dataclass
class VolumeImages:
    """One volume in the orientation of the training set; an `ImageSource` for `RankLoader`.

    Attributes:
        name: name of the volume, for messages.
        stored: the volume as stored.
        turn: transform from the stored orientation to that of the training set.
        dtype: dtype of the voxels read; conversion to integers is exact.
        unreadable: read errors in this process by sample; unreadable voxels are 0.
    """

    name: str
    stored: StoredVolume
    turn: VolumeTurn
    dtype: np.dtype[Any]
    has_masks: bool = False
    classes: Sequence[str] = ()
    unreadable: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.labels = np.zeros(1, np.int64)  # unknown
        self.channels = self.stored.channels

    def __len__(self) -> int:
        return 1

    def image_size(self, sample: int) -> Size:
        return self.turn.seen_size(self.stored.size)

    def read(self, sample: int, box: Box | None = None) -> Pixels:
        """Read a box (slices, rows, columns, channels); errors are recorded, and voxels are 0."""
        size = self.image_size(sample)
        box = whole_box(size) if box is None else box
        try:
            found = self.stored.read(self.turn.stored_box(box, size))
            return self.turn.seen(_exactly(found, self.dtype))
        except Exception as error:  # decoders may raise anything for damaged files
            self.unreadable[sample] = f"{self.name}: {_message(error)}"
            return np.zeros((*extents(box), self.channels), self.dtype)

    def read_mask(self, sample: int, box: Box | None = None) -> Pixels:
        raise ValueError("volumes to predict have no masks")


def volume_input(path: Path, name: str, trained: Trained) -> Input:
    """The network input of a volume file.

    Raises:
        SlideError: the file cannot be opened, or does not match the network.
    """
    try:
        found = open_volume(path)
    except Exception as error:  # decoders may raise anything for damaged files
        raise SlideError(f"{path}: {_message(error)}") from error
    return _input(found, name, trained, path)


def shard_volume_input(dataset: ShardDataset, number: int, name: str, trained: Trained) -> Input:
    """The network input of a sample of a data set.

    Raises:
        SlideError: the sample does not match the network.
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
    """Read a box of a mask, in the orientation of the training set."""
    stored = source.turn.stored_box(box, source.image_size(0))
    return source.turn.seen(dataset.read_mask(number, stored))


def shard_volume(dataset: ShardDataset, number: int) -> StoredVolume:
    """A sample of a data set of volumes as a stored volume."""
    sample = dataset.sample(number)
    assert isinstance(sample, VolumeSample)
    affine = None if sample.affine is None else np.array(sample.affine)
    read = partial(dataset.read, number)
    return StoredVolume(sample.size, dataset.channels, dataset.dtype, sample.spacing, affine, read)


def _input(stored: StoredVolume, name: str, trained: Trained, path: Path | None) -> Input:
    """Inputs of segmentation are whole volumes; other tasks crop or pad to the training size."""
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


def _message(error: Exception) -> str:
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    return text or type(error).__name__


def _exactly(voxels: Pixels, dtype: np.dtype[Any]) -> Pixels:
    """Convert voxels to `dtype` without loss; floats are rounded to other floats.

    Raises:
        ValueError: the conversion is lossy, or values are not finite.
    """
    if voxels.dtype.kind == "f":
        bad = int(np.size(voxels) - np.isfinite(voxels).sum())
        if bad:
            many = counted(voxels.size, "voxel")
            raise ValueError(
                f"{bad} of {many} read are NaN or infinite: replace them, for example by "
                "numpy.nan_to_num"
            )
    with np.errstate(invalid="ignore", over="ignore"):
        found = voxels.astype(dtype, copy=False)
    rounded = voxels.dtype.kind == dtype.kind == "f" and np.isfinite(found).all()
    if not (rounded or np.array_equal(found, voxels)):
        raise ValueError(
            f"voxels of {voxels.dtype} from {voxels.min():g} to {voxels.max():g} cannot be "
            f"converted exactly to {dtype}, on which the network was trained: convert the volume "
            "to the units of the training set"
        )
    return found
