"""Volumes as other programs write them, of voxels (i, j, k) and nibabel's affine of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zarr
from pydicom import FileDataset
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import (
    CTImageStorage,
    EnhancedMRImageStorage,
    ExplicitVRLittleEndian,
    generate_uid,
)

SIZE = (5, 7, 4)  # i, j, k
TYPES = {"t": "time", "c": "channel"}
TO_LPS = np.array([-1.0, -1.0, 1.0])


def oblique(spacing=(0.7, 0.8, 2.5)) -> np.ndarray:
    """An affine of voxels that are no cubes, turned about all three axes."""
    turned = np.eye(3)
    for axis, angle in enumerate((0.3, -0.5, 2.0)):
        c, s = np.cos(angle), np.sin(angle)
        a, b = (axis + 1) % 3, (axis + 2) % 3
        one = np.eye(3)
        one[[a, a, b, b], [a, b, a, b]] = c, -s, s, c
        turned = one @ turned
    affine = np.eye(4)
    affine[:3, :3] = turned * spacing
    affine[:3, 3] = 3.0, -40.5, 17.0
    return affine


def voxels(dtype=np.int16) -> np.ndarray:
    """(i, j, k), all different; the largest is at 1, 4, 3."""
    found = np.random.default_rng(0).permutation(np.prod(SIZE)).reshape(SIZE)
    found[1, 4, 3] = 999
    return found.astype(dtype)


def dataset(kind=CTImageStorage, series="1.2.3") -> FileDataset:
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = kind
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    made.SOPClassUID, made.SOPInstanceUID = kind, meta.MediaStorageSOPInstanceUID
    made.SeriesInstanceUID = series
    return made


def set_pixels(made: Dataset, rows: np.ndarray) -> None:
    """(rows, columns), or frames before them."""
    made.Rows, made.Columns = rows.shape[-2:]
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.BitsAllocated = made.BitsStored = rows.itemsize * 8
    made.HighBit = made.BitsStored - 1
    made.PixelRepresentation = int(rows.dtype.kind == "i")
    made.PixelData = rows.tobytes()


def slices(pixels: np.ndarray, affine: np.ndarray, **more) -> list[FileDataset]:
    """A dataset for each slice k; columns are i and rows are j."""
    to_lps = affine[:3] * TO_LPS[:, None]
    lengths = np.linalg.norm(to_lps[:, :3], axis=0)
    found = []
    for k in range(pixels.shape[2]):
        made = dataset(**more)
        set_pixels(made, np.ascontiguousarray(pixels[:, :, k].T))
        made.ImagePositionPatient = [f"{x:.8g}" for x in to_lps @ [0, 0, k, 1]]
        made.ImageOrientationPatient = [
            f"{x:.8f}" for axis in (0, 1) for x in to_lps[:, axis] / lengths[axis]
        ]
        made.PixelSpacing = [f"{lengths[1]:.8g}", f"{lengths[0]:.8g}"]
        made.InstanceNumber = 7 * k % pixels.shape[2] + 1
        found.append(made)
    return found


def save(made: list[FileDataset], folder: Path, suffix: str = ".dcm") -> list[Path]:
    """By names in another order than their places."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{37 * k % 101:03d}{suffix}" for k in range(len(made))]
    for one, path in zip(made, paths, strict=True):
        one.save_as(path, enforce_file_format=True)
    return paths


def enhanced(pixels: np.ndarray, affine: np.ndarray, slope: float = 1.0) -> FileDataset:
    """One dataset of all slices, frames from the last to the first."""
    each = slices(pixels, affine)[::-1]
    made = dataset(EnhancedMRImageStorage, "1.2.4")
    set_pixels(made, np.stack([one.pixel_array for one in each]))
    made.NumberOfFrames = len(each)
    shared = Dataset()
    shared.PlaneOrientationSequence = [Dataset()]
    shared.PlaneOrientationSequence[0].ImageOrientationPatient = each[0].ImageOrientationPatient
    shared.PixelMeasuresSequence = [Dataset()]
    shared.PixelMeasuresSequence[0].PixelSpacing = each[0].PixelSpacing
    made.SharedFunctionalGroupsSequence = [shared]
    made.PerFrameFunctionalGroupsSequence = []
    for one in each:
        own = Dataset()
        own.PlanePositionSequence = [Dataset()]
        own.PlanePositionSequence[0].ImagePositionPatient = one.ImagePositionPatient
        own.PixelValueTransformationSequence = [Dataset()]
        own.PixelValueTransformationSequence[0].RescaleSlope = slope
        own.PixelValueTransformationSequence[0].RescaleIntercept = 0
        made.PerFrameFunctionalGroupsSequence.append(own)
    return made


def check(found, pixels: np.ndarray, affine: np.ndarray | None = None) -> None:
    """A `VolumeFile` has the voxels, in any order, and the marker at nibabel's position."""
    whole = found.read()
    assert whole.shape == (*found.size, found.channels)
    assert whole.dtype == found.dtype
    box = (1, 3, 2, 5, 1, 4)
    assert (found.read(box) == whole[1:3, 2:5, 1:4]).all()
    assert sorted(whole.ravel()) == sorted(pixels.ravel())
    if affine is not None:
        for value in (pixels.max(), pixels.min(), pixels[2, 2, 2]):
            place = np.argwhere(whole[..., 0] == value)[0]
            expected = affine[:3] @ [*np.argwhere(pixels == value)[0], 1]
            np.testing.assert_allclose(found.affine @ [*place, 1], expected, atol=1e-5)
        np.testing.assert_allclose(
            sorted(found.spacing), sorted(np.linalg.norm(affine[:3, :3], axis=0)), rtol=1e-6
        )


def described(axes, unit="micrometer", scale=0.5, transforms=(), levels=("0",), **more):
    """`multiscales` of a store."""
    units = {} if unit is None else {"unit": unit}
    made = [
        {"name": axis, "type": TYPES.get(axis, "space")} | (units if axis in "zyx" else {})
        for axis in axes
    ]
    step = {"z": 2.0, "y": 0.25, "x": scale}
    sets = [
        {
            "path": level,
            "coordinateTransformations": [
                {"type": "scale", "scale": [step.get(axis, 1.0) for axis in axes]},
                {"type": "translation", "translation": [0.0] * len(axes)},
            ],
        }
        for level in levels
    ]
    return [{"axes": made, "datasets": sets, "coordinateTransformations": [*transforms], **more}]


def save_zarr(path, arrays, multiscales, version="0.4"):
    group = zarr.open_group(str(path), mode="w", zarr_format=2 if version == "0.4" else 3)
    for name, array in arrays.items():
        chunks = tuple(min(n, 3) for n in array.shape)
        made = group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks)
        made[...] = array
    if version == "0.4":
        group.attrs["multiscales"] = [{"version": version, **one} for one in multiscales]
    else:
        group.attrs["ome"] = {"version": version, "multiscales": multiscales}
