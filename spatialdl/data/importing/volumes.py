"""Import of a folder of volumes of other programs as a data set.

Voxels are stored unchanged; the affine gives their position in the patient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.common.text import counted, progress_bar
from spatialdl.data.format import volume_chunk
from spatialdl.data.image_source import DTYPES, whole_box
from spatialdl.data.importing.image_folder import BrokenImagesError
from spatialdl.data.importing.volume_file import (
    SUFFIXES,
    UNREAD,
    open_volume,
    volume_name,
    volumes_in,
)
from spatialdl.data.importing.volume_files.volume import StoredVolume
from spatialdl.data.region_shard import OtherTypeError
from spatialdl.data.tables import label_slides
from spatialdl.data.volume_geometry import VolumeTurn, orientation_of
from spatialdl.data.writer import ShardWriter

_AS_STORED = VolumeTurn()
_APART = 0.1
"""Largest distance of a mask's corners from its volume's, relative to the smallest spacing."""


@dataclass(frozen=True)
class FoundVolume:
    """A volume in a folder: its path, and a function that opens it."""

    path: Path
    open: Callable[[], StoredVolume]


def import_volumes(
    folder: Path,
    out: Path,
    *,
    masks: Path | None = None,
    labels: Path | None = None,
    skip_broken: bool = False,
    **settings: Any,
) -> list[str]:
    """Write a data set from a folder of volumes, some slices at a time.

    Warns about volumes of unknown spacing, and about DICOM objects that are not images.

    Args:
        folder: folder of the volumes, see `find_volumes`; their names become sample names.
        out: the data set to create.
        masks: folder with a mask of the same name for each volume, with classes 0 to 255. A mask
            with an affine is reoriented to its volume.
        labels: a table with columns slide or slide_id (the name), label and, optionally, split.
            With masks the label may be empty.
        skip_broken: skip volumes that cannot be read or do not match earlier ones.
        settings: arguments of `ShardWriter`.

    Returns:
        Errors of the skipped volumes.

    Raises:
        BrokenImagesError: some cannot be read and `skip_broken` is false, or none can be read.
        ValueError: no volumes, duplicate names, a missing label, or most are of another type than
            the first readable one.
    """
    found = find_volumes(folder)
    of_masks = None if masks is None else find_volumes(masks, masks=True)
    rows = label_slides(list(found), labels, empty=masks is not None)
    classes = sorted({row.labels[0] for row in rows.values()} - {""})
    if masks is not None and classes:
        warnings.warn(
            f"the labels ({', '.join(classes[:5])}{', ...' * (len(classes) > 5)}) also name the "
            "classes of the masks; leave the column label empty if they do not",
            stacklevel=2,
        )
    broken: list[str] = []
    without_spacing = []
    written: list[FoundVolume] = []
    others = 0  # volumes of another type
    with ShardWriter(out, classes, kind="volumes", **settings) as writer:
        for name, one in progress_bar(found.items(), "volumes", "volume"):
            row = rows.get(name)
            try:
                volume = _narrowed(one.open())
                mask = None if of_masks is None else _mask(name, of_masks, volume)
                writer.add(
                    _Rows(volume),
                    (row.labels[0] or None) if row else None,
                    row.split if row else None,
                    slide=name,
                    mask=mask,
                    spacing=volume.spacing,
                    affine=volume.affine,
                )
                without_spacing += [name] if volume.spacing is None else []
                written.append(one)
            except Exception as error:  # decoders raise arbitrary errors for damaged files
                others += isinstance(error, OtherTypeError)
                broken.append(f"{one.path}: {' '.join(str(error).split()) or type(error).__name__}")
        if others > len(written):
            raise ValueError(
                f"{others} of {len(found)} volumes have another type or number of channels than "
                f"the first, {written[0].path}, and nothing was written; convert that one to the "
                "type of the others, or remove it"
            )
        if broken and (not skip_broken or not written):
            raise BrokenImagesError(broken, len(found), "volumes")
    if without_spacing:
        shown = ", ".join(without_spacing[:5]) + ", ..." * (len(without_spacing) > 5)
        of = counted(len(without_spacing), "volume")
        warnings.warn(f"the spacing of {of} is unknown: {shown}", stacklevel=2)
    return broken


def find_volumes(folder: Path, *, masks: bool = False) -> dict[str, FoundVolume]:
    """Find the volumes of a folder, by name: the file name without suffix.

    Files and OME-Zarr stores must be in the folder itself, DICOM series at any depth. A series of
    several files is named after their folder and its parents (A_B), with the SeriesInstanceUID
    appended if the folder has several series.

    Args:
        folder: folder to search.
        masks: whether these are masks: DICOM segmentation objects raise instead of being skipped.

    Raises:
        ValueError: the folder does not exist or has no volumes, or duplicate names.
    """
    kinds = f"{', '.join(SUFFIXES)} or DICOM"
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a folder of volumes: {kinds}")
    files, dicom = volumes_in(folder)
    unread = [path.name for path in sorted(folder.iterdir()) if path.name.lower().endswith(UNREAD)]
    if unread:
        warnings.warn(
            f"{folder}: skipped {counted(len(unread), 'file')} of unsupported formats "
            f"({', '.join(unread[:5])}{', ...' * (len(unread) > 5)}); convert them to NIfTI, e.g. "
            "with nibabel or SimpleITK",
            stacklevel=3,
        )
    if masks and dicom.segmentation is not None:
        raise ValueError(
            f"{dicom.segmentation} is a DICOM segmentation object (SEG), which is not supported as "
            "a mask; convert it to NIfTI or NRRD with the name of its volume, e.g. with dcmqi's "
            "segimage2itkimage"
        )
    found: dict[str, FoundVolume] = {}
    for path in files:
        _add(found, volume_name(path), FoundVolume(path, partial(open_volume, path)))
    for name, series in dicom.series.items():
        _add(found, name, FoundVolume(series.path, series.open))
    if dicom.others:
        shown = ", ".join(f"{count} x {kind}" for kind, count in sorted(dicom.others.items()))
        warnings.warn(f"{folder}: skipped DICOM objects that are not images: {shown}", stacklevel=3)
    if not found:
        raise ValueError(f"{folder} contains no volumes: {kinds}")
    return dict(sorted(found.items()))


def _add(found: dict[str, FoundVolume], name: str, one: FoundVolume) -> None:
    if name in found:
        raise ValueError(f"{found[name].path} and {one.path} have the same name; rename one")
    found[name] = one


class _Rows:
    """Adapter of a volume, or mask, that `ShardWriter` reads some slices at a time."""

    def __init__(self, volume: StoredVolume, turn: VolumeTurn = _AS_STORED) -> None:
        self._volume, self._turn = volume, turn
        self.size = self._turn.seen_size(volume.size)
        self.shape: tuple[int, ...] = (*self.size, volume.channels)
        self.dtype = volume.dtype

    def __getitem__(self, slices: slice) -> npt.NDArray[Any]:
        box = self._turn.stored_box(
            (slices.start, slices.stop, *whole_box(self.size)[2:]), self.size
        )
        return self._turn.seen(self._volume.read(box))


class _Classes(_Rows):
    """A mask; some programs save its classes as floats."""

    def __init__(self, path: Path, mask: StoredVolume, turn: VolumeTurn) -> None:
        super().__init__(mask, turn)
        self._path, self.shape = path, self.size

    def __getitem__(self, slices: slice) -> npt.NDArray[Any]:
        pixels = super().__getitem__(slices)[..., 0]
        if pixels.dtype.kind != "f":
            return pixels
        if not (np.isfinite(pixels) & (pixels == np.rint(pixels))).all():
            raise ValueError(f"mask {self._path} has non-integer values")
        return pixels.astype(np.int64)


def _narrowed(volume: StoredVolume) -> StoredVolume:
    """Convert integer types that shards do not support to int16 or uint16, if all values fit."""
    if volume.dtype.kind not in "iu" or volume.dtype.name in DTYPES:
        return volume
    at_once, low, high = volume_chunk(volume.size)[0], [], []
    for start in range(0, volume.size[0], at_once):
        part = _Rows(volume)[start : min(start + at_once, volume.size[0])]
        low.append(int(part.min()))
        high.append(int(part.max()))
    for dtype in (np.int16, np.uint16):
        if np.iinfo(dtype).min <= min(low) and max(high) <= np.iinfo(dtype).max:
            return replace(volume, dtype=np.dtype(dtype))
    return volume


def _mask(name: str, masks: dict[str, FoundVolume], volume: StoredVolume) -> _Classes:
    if name not in masks:
        raise ValueError(f"no mask named {name}")
    path = masks[name].path
    mask = masks[name].open()
    if mask.channels > 1:
        raise ValueError(f"mask {path} has {mask.channels} channels, expected one")
    return _Classes(path, mask, _turn_onto(mask, volume, path))


def _turn_onto(mask: StoredVolume, volume: StoredVolume, path: Path) -> VolumeTurn:
    """The turn that aligns a mask with its volume, if both have an affine.

    Raises:
        ValueError: no exchange and reversal of dims aligns them.
    """
    if mask.affine is None or volume.affine is None or sorted(mask.size) != sorted(volume.size):
        return _AS_STORED
    apart = []
    onto = VolumeTurn.between(orientation_of(mask.affine), orientation_of(volume.affine))
    for turn in (_AS_STORED, onto):
        if turn.seen_size(mask.size) == volume.size:
            apart.append(_corners_apart(mask.affine, volume.affine, turn, volume.size))
            if apart[-1] <= _APART * min(volume.spacing or (1.0,)):
                return turn
    far = f"{min(apart):.3g} mm from" if apart else "in other directions than"
    raise ValueError(
        f"mask {path} lies {far} its volume; resample it to the volume's grid, or give it the "
        "volume's affine if its voxels are the same"
    )


def _corners_apart(
    mask: npt.NDArray[np.float64],
    volume: npt.NDArray[np.float64],
    turn: VolumeTurn,
    size: tuple[int, ...],
) -> float:
    """The largest distance between corner voxels of the turned mask and the volume, in mm."""
    apart = 0.0
    for corner in np.ndindex(2, 2, 2):
        seen = tuple((n - 1) * end for n, end in zip(size, corner, strict=True))
        box = turn.stored_box(tuple(k for n in seen for k in (n, n + 1)), size)
        gap = mask @ [*box[::2], 1] - volume @ [*seen, 1]
        apart = max(apart, float(np.linalg.norm(gap)))
    return apart
