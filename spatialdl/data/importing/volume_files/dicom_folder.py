"""DICOM series in folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spatialdl.data.importing.volume_files.dicom import open_series
from spatialdl.data.importing.volume_files.volume import StoredVolume, needed
from spatialdl.text import counted

if TYPE_CHECKING:
    from pydicom import Dataset

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
            ValueError: not a volume, or a file that may belong to it cannot be read.
        """
        if self.unreadable:
            path, why = self.unreadable[0]
            files = counted(len(self.unreadable), "file")
            raise ValueError(f"{files} in or beside it cannot be read: {path.name}: {why}")
        return open_series(self.files)


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
        needed("pydicom")
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
        header: Dataset = needed("pydicom").dcmread(
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
