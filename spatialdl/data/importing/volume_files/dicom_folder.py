"""Which DICOM series lie in folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pydicom import Dataset, dcmread

from spatialdl.data.importing.volume_files.dicom import open_series
from spatialdl.data.importing.volume_files.volume import StoredVolume
from spatialdl.text import counted

_SUFFIXES = (".dcm", ".dicom", ".ima")
_NO_VOLUMES = {  # which have rows and columns, too
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
        files: of it, by path, and what they say but for the pixels.
        unreadable: damaged files that lie beside them and may be of the series, and why.
    """

    uid: str
    files: list[tuple[Path, Dataset]] = field(default_factory=list)
    unreadable: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The file, or the deepest folder that has all of them."""
        paths = [path for path, _ in self.files or self.unreadable]
        if len(paths) == 1:
            return paths[0]
        return Path(os.path.commonpath([path.parent for path in paths]))

    def open(self) -> StoredVolume:
        """As a volume.

        Raises:
            ValueError: it is none, or a file beside it cannot be read, which may be one of it.
        """
        if self.unreadable:
            path, why = self.unreadable[0]
            files = counted(len(self.unreadable), "file")
            raise ValueError(f"{files} beside it, or of it, cannot be read: {path.name}: {why}")
        return open_series(self.files)


@dataclass(frozen=True)
class DicomFolder:
    """What folders have of DICOM.

    Attributes:
        series: by name: of the file, or folder, with the UID behind where a folder has several.
        others: how many objects there are that are no images, by what they are.
        segmentation: a segmentation object, if there is one.
    """

    series: dict[str, DicomSeries]
    others: Counter[str]
    segmentation: Path | None = None


def find_series(folder: Path, paths: Iterable[Path]) -> DicomFolder:
    """The series of files and folders inside a folder; other files than DICOM are passed over."""
    found: dict[str, DicomSeries] = {}
    bad: list[tuple[Path, str]] = []
    others: Counter[str] = Counter()
    segmentation = None
    for path in sorted(file for one in paths for file in _files(one) if _is_dicom(file)):
        try:
            kind = _no_image(said := _header(path))
        except Exception as error:  # what pydicom raises of damaged files is anything
            bad.append((path, " ".join(str(error).split()) or type(error).__name__))
            continue
        if kind is None:
            uid = str(said.SeriesInstanceUID)
            found.setdefault(uid, DicomSeries(uid)).files.append((path, said))
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
    """All but the pixels; of files, too, that lack the first 132 bytes, as old ones do."""
    with path.open("rb") as file:
        return dcmread(file, stop_before_pixels=True, force=True, specific_tags=list(_TAGS))


def _no_image(said: Dataset) -> str | None:
    """What an object is that is no image of a series.

    Raises:
        ValueError: it is damaged.
    """
    uid = said.get("SOPClassUID", None) or said.file_meta.get("MediaStorageSOPClassUID", None)
    if uid is None:
        raise ValueError("it has no SOP Class UID, as DICOM files have")
    if uid in _NO_VOLUMES:
        return _NO_VOLUMES[uid]
    lacking = [name for name in ("Rows", "Columns", "SeriesInstanceUID") if not said.get(name)]
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
