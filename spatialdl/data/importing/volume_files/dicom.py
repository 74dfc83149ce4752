"""DICOM series in folders as volumes: single-slice files, or an enhanced multi-frame file.

Slices are sorted by their position along the normal; DICOM coordinates, which point to the left and
the back, are converted to RAS+.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spatialdl.common.packages import needed
from spatialdl.common.text import counted
from spatialdl.data.importing.volume_files.volume import Read, Reader, StoredVolume, affine_from

if TYPE_CHECKING:
    from pydicom import Dataset

_TO_RAS = np.array([-1.0, -1.0, 1.0])
_UNEVEN = 0.1
"""Largest deviation of a slice from an even stack, relative to the slice distance."""


@dataclass(frozen=True)
class _Frame:
    """A slice.

    Attributes:
        path: its file.
        number: frame index in the file, None for a single frame.
        size: (rows, columns).
        position: of its first voxel, in DICOM millimetres.
        directions: (2, 3), unit vectors to the next column and to the next row.
        spacing: of rows and of columns; None if unknown.
        slope, intercept: rescale stored values to modality values.
    """

    path: Path
    number: int | None
    size: tuple[int, int]
    position: npt.NDArray[np.float64]
    directions: npt.NDArray[np.float64]
    spacing: tuple[float, float] | None
    slope: float
    intercept: float


def _check_kind(file: Path, header: Dataset) -> None:
    samples, colours = header.get("SamplesPerPixel", 1), header.get("PhotometricInterpretation", "")
    if samples != 1 or colours not in ("MONOCHROME1", "MONOCHROME2"):
        raise ValueError(f"{file.name} has {samples} samples of {colours}, expected grey")
    if "ModalityLUTSequence" in header:
        raise ValueError(f"{file.name} has a modality LUT, which is unsupported; convert it first")


def _frames(file: Path, header: Dataset) -> Iterator[_Frame]:
    number = int(header.get("NumberOfFrames", None) or 1)
    each = header.get("PerFrameFunctionalGroupsSequence", None)
    if each is None:
        if number > 1:
            kind = header.SOPClassUID.name
            raise ValueError(f"{file.name} has {number} frames of {kind} without frame positions")
        yield _frame(file, None, header, [header])
        return
    if len(each) != number:
        raise ValueError(f"{file.name} has {number} frames, but positions of {len(each)}")
    shared = list(header.get("SharedFunctionalGroupsSequence", None) or [])
    for index, own in enumerate(each):
        groups = [item[0] for one in (own, *shared) for item in _sequences(one)]
        yield _frame(file, index if number > 1 else None, header, groups)


def _sequences(group: Dataset) -> Iterator[Any]:
    """Macros of a functional group with the position, geometry and value scale of a frame."""
    for name in ("PlanePosition", "PlaneOrientation", "PixelMeasures", "PixelValueTransformation"):
        found = group.get(f"{name}Sequence")
        if found:
            yield found


def _frame(file: Path, number: int | None, header: Dataset, groups: Sequence[Dataset]) -> _Frame:
    def value(name: str) -> Any:
        found = (one.get(name) for one in groups)
        return next((one for one in found if one is not None and one != ""), None)

    position, directions = value("ImagePositionPatient"), value("ImageOrientationPatient")
    for name, found, count in (("Position", position, 3), ("Orientation", directions, 6)):
        if found is None or len(found) != count:
            raise ValueError(f"{file.name} has no Image {name} (Patient): its position is unknown")
    spacing = value("PixelSpacing")
    return _Frame(
        file,
        number,
        (int(header.Rows), int(header.Columns)),
        np.array(position, np.float64),
        np.array(directions, np.float64).reshape(2, 3),
        None if spacing is None else (float(spacing[0]), float(spacing[1])),
        float(1 if (slope := value("RescaleSlope")) is None else slope),
        float(value("RescaleIntercept") or 0),
    )


def _ordered(frames: list[_Frame]) -> list[_Frame]:
    """Sort slices along the normal and check that they form an even stack."""
    first = frames[0]
    if len(frames) < 2:
        raise ValueError("it has one slice, expected two or more")
    for what, values in (
        ("sizes", {frame.size for frame in frames}),
        ("spacings", {frame.spacing for frame in frames}),
    ):
        if len(values) > 1:
            raise ValueError(f"its slices have different {what}: {', '.join(map(str, values))}")
    for frame in frames:
        if not np.allclose(frame.directions, first.directions, atol=1e-3):
            raise ValueError(
                f"its slices have different orientations: {first.directions.ravel().tolist()} and "
                f"{frame.directions.ravel().tolist()} ({frame.path.name})"
            )
    normal = np.cross(*first.directions)
    found = sorted(frames, key=lambda frame: float(frame.position @ normal))
    _check_even(found, [float(frame.position @ normal) for frame in found])
    return found


def _check_even(frames: Sequence[_Frame], along: Sequence[float]) -> None:
    gaps = np.diff(along)
    usual = float(np.sort(gaps)[(len(gaps) - 1) // 2])
    same = int(np.argmin(gaps))
    if gaps[same] <= 1e-4 + 1e-3 * usual:
        names = f"{frames[same].path.name} and {frames[same + 1].path.name}"
        raise ValueError(
            f"two slices or more lie at {along[same]:.6g} mm along their normal ({names}); split "
            "the series by time, echo or contrast"
        )
    positions = np.array([frame.position for frame in frames])
    places = np.linspace(positions[0], positions[-1], len(frames))
    step = float(np.linalg.norm(places[1] - places[0]))
    if np.linalg.norm(positions - places, axis=1).max() > _UNEVEN * step:
        worst = np.flatnonzero(abs(gaps - usual) > _UNEVEN * usual)[:8]
        where = ", ".join(f"{along[k]:.6g} to {along[k + 1]:.6g}" for k in worst)
        raise ValueError(
            f"its slices are not evenly spaced, or some are missing: mostly {usual:.6g} mm along "
            f"their normal, but not from {where or 'one to the next beside it'} mm"
        )


def _dtype(frames: Sequence[_Frame], header: Sequence[Dataset]) -> np.dtype[Any]:
    """The stored type; with rescaling an integer type that fits, else float32."""
    scales = {(frame.slope, frame.intercept) for frame in frames}
    if any(not one.is_integer() for scale in scales for one in scale):
        return np.dtype(np.float32)
    plain = scales == {(1.0, 0.0)}
    ends = []
    for one in header:
        bits, signed = (
            int(one.BitsAllocated if plain else one.BitsStored),
            bool(one.PixelRepresentation),
        )
        stored = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        ends += [value * slope + more for value in stored for slope, more in scales]
    for name in (*(("uint8",) if plain else ()), "int16", "uint16", "int32", "int64"):
        limits = np.iinfo(np.dtype(name))
        if limits.min <= min(ends) and max(ends) <= limits.max:
            return limits.dtype
    raise ValueError(f"it has values from {min(ends):g} to {max(ends):g}, which exceed int64")


def _start(frames: Sequence[_Frame], dtype: np.dtype[Any]) -> Read:
    def read(box: tuple[slice, ...]) -> npt.NDArray[Any]:
        return np.stack([_values(frame, dtype)[box[1:]] for frame in frames[box[0]]])

    return read


def _values(frame: _Frame, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        decode = needed("pydicom.pixels", "volumes").pixel_array
        stored: npt.NDArray[Any] = decode(frame.path, index=frame.number, raw=True)
    except Exception as error:  # decoders raise arbitrary errors for damaged files
        raise ValueError(f"{frame.path.name}: {error}") from error
    if stored.shape != frame.size:
        raise ValueError(f"{frame.path.name} has pixels {stored.shape}, expected {frame.size}")
    if dtype.kind == "f":
        return (stored * frame.slope + frame.intercept).astype(dtype)
    if (frame.slope, frame.intercept) != (1.0, 0.0):
        stored = stored.astype(np.int64) * int(frame.slope) + int(frame.intercept)
    return np.asarray(stored, dtype)  # pydicom masks unused bits


_SUFFIXES = (".dcm", ".dicom", ".ima")
_NO_VOLUMES = {  # objects that also have rows and columns
    "1.2.840.10008.5.1.4.1.1.66.4": "Segmentation Storage",
    "1.2.840.10008.5.1.4.1.1.481.2": "RT Dose Storage",
}
SEGMENTATION = "Segmentation Storage"
_TAGS = [
    *("SOPClassUID", "SeriesInstanceUID", "Rows", "Columns", "SamplesPerPixel", "NumberOfFrames"),
    *("PhotometricInterpretation", "BitsAllocated", "BitsStored", "PixelRepresentation"),
    *("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "ModalityLUTSequence"),
    *("RescaleSlope", "RescaleIntercept", "PerFrameFunctionalGroupsSequence"),
    "SharedFunctionalGroupsSequence",
]


@dataclass(frozen=True)
class DicomSeries:
    """The files of a series.

    Attributes:
        uid: its SeriesInstanceUID.
        files: paths of its files, with their headers.
        unreadable: damaged files beside them that may belong to the series, and their errors.
    """

    uid: str
    files: list[tuple[Path, Dataset]] = field(default_factory=list)
    unreadable: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The file, or the deepest folder that contains all files."""
        paths = [path for path, _ in self.files or self.unreadable]
        if len(paths) == 1:
            return paths[0]
        return Path(os.path.commonpath([path.parent for path in paths]))

    def open(self) -> StoredVolume:
        """Open the series as a volume.

        Raises:
            ValueError: a file that may belong to it cannot be read; slices are missing, unevenly
                spaced, or differ in size or orientation; or it has colours, or frames without a
                position.
        """
        if self.unreadable:
            path, why = self.unreadable[0]
            files = counted(len(self.unreadable), "file")
            raise ValueError(f"{files} in or beside it cannot be read: {path.name}: {why}")
        for file, header in self.files:
            _check_kind(file, header)
        frames = _ordered([frame for one in self.files for frame in _frames(*one)])
        first, last = frames[0], frames[-1]
        size = (len(frames), *first.size)
        dtype = _dtype(frames, [header for _, header in self.files])
        reader = Reader(partial(_start, frames, dtype))
        if first.spacing is None:
            return StoredVolume(size, 1, dtype, None, None, reader)
        step = (last.position - first.position) / (len(frames) - 1)
        to_column, to_row = first.directions
        steps = [step, to_row * first.spacing[0], to_column * first.spacing[1]]
        geometry = affine_from([one * _TO_RAS for one in steps], first.position * _TO_RAS)
        return StoredVolume(size, 1, dtype, *geometry, reader)


@dataclass(frozen=True)
class DicomFolder:
    """DICOM objects in folders.

    Attributes:
        series: by name of the file, or folder, with the UID appended if a folder has several.
        others: number of objects that are not images, by kind.
        segmentation: a segmentation object, if there is one.
    """

    series: dict[str, DicomSeries]
    others: Counter[str]
    segmentation: Path | None = None


def find_series(folder: Path, paths: Iterable[Path]) -> DicomFolder:
    """Find the series of files and folders inside a folder; files other than DICOM are ignored.

    Raises:
        ValueError: there are DICOM files, but pydicom is not installed.
    """
    found: dict[str, DicomSeries] = {}
    bad: list[tuple[Path, str]] = []
    others: Counter[str] = Counter()
    segmentation = None
    for path in sorted(file for one in paths for file in _files(one) if _is_dicom(file)):
        needed("pydicom", "volumes")
        try:
            kind = _no_image(header := _header(path))
        except Exception as error:  # pydicom raises arbitrary errors for damaged files
            bad.append((path, " ".join(str(error).split()) or type(error).__name__))
            continue
        if kind is None:
            uid = str(header.SeriesInstanceUID)
            found.setdefault(uid, DicomSeries(uid)).files.append((path, header))
        else:
            others[kind] += 1
            segmentation = path if kind == SEGMENTATION else segmentation
    for path, why in bad:
        near = [one for one in found.values() if path.parent in {p.parent for p, _ in one.files}]
        for one in near or [found.setdefault(str(path.parent), DicomSeries(""))]:
            one.unreadable.append((path, why))
    return DicomFolder(_named(folder, found.values()), others, segmentation)


def _files(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        return [path]
    found = []
    for root, inside, names in os.walk(path):
        inside[:] = [one for one in inside if one[0] != "." and not one.endswith(".zarr")]
        found += [Path(root) / name for name in names]
    return found


def _is_dicom(path: Path) -> bool:
    if path.name[0] == "." or not path.is_file():
        return False
    if path.suffix.lower() in _SUFFIXES:
        return True
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def _header(path: Path) -> Dataset:
    """The header without pixels; also of old files that lack the 128-byte preamble."""
    with path.open("rb") as file:
        header: Dataset = needed("pydicom", "volumes").dcmread(
            file, stop_before_pixels=True, force=True, specific_tags=list(_TAGS)
        )
    return header


def _no_image(header: Dataset) -> str | None:
    """The kind of an object that is not an image of a series; None if it is one.

    Raises:
        ValueError: it is damaged.
    """
    uid = header.get("SOPClassUID", None) or header.file_meta.get("MediaStorageSOPClassUID", None)
    if uid is None:
        raise ValueError("it has no SOP Class UID, which DICOM files require")
    if uid in _NO_VOLUMES:
        return _NO_VOLUMES[uid]
    lacking = [name for name in ("Rows", "Columns", "SeriesInstanceUID") if not header.get(name)]
    kind = str(uid.name)
    if lacking and "Image Storage" in kind:
        raise ValueError(f"it is {kind} without {', '.join(lacking)}")
    return kind if lacking else None


def _named(folder: Path, series: Iterable[DicomSeries]) -> dict[str, DicomSeries]:
    of_folders = Counter(one.path for one in series if len(one.files) > 1)
    named: dict[str, DicomSeries] = {}
    for one in series:
        inside = one.path.relative_to(folder)
        if len(one.files) == 1 and one.path.suffix.lower() in _SUFFIXES:
            inside = inside.with_suffix("")
        name = "_".join(inside.parts) or folder.resolve().name
        if of_folders[one.path] > 1:
            name += f"_{one.uid}"
        if name in named:
            raise ValueError(f"{named[name].path} and {one.path} have the same name {name}")
        named[name] = one
    return dict(sorted(named.items()))
