"""DICOM whole-slide series that OpenSlide reads: one file per level, one per picture beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import ExplicitVRLittleEndian, JPEGBaseline8Bit, generate_uid

from tests.slides.tiled_tiffs import jpeg, tiles_of

Bytes = npt.NDArray[np.uint8]
SLIDE_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.6"
ANNOTATION_CLASS = "1.2.840.10008.5.1.4.1.1.91.1"
_SIDE = 128  # of a tile


def uid(*words: object) -> str:
    """The same UID for the same words."""
    return str(generate_uid(entropy_srcs=[str(word) for word in words]))


def write_series(
    folder: Path,
    image: Bytes,
    series: str,
    levels: int = 3,
    mpp: float = 0.5,
    *,
    label: bool = True,
    name: str = "level-{}.dcm",
) -> list[Path]:
    """Write a pyramid of an image (rows, columns, 3) as a series of that SeriesInstanceUID."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for level in range(levels):
        kind = ["DERIVED", "PRIMARY", "VOLUME", "RESAMPLED"] if level else None
        pixels = np.ascontiguousarray(image[:: 2**level, :: 2**level])
        files.append(folder / name.format(level))
        _write(files[-1], pixels, series, kind, mpp * 2**level)
    if label:
        files.append(folder / name.format("label"))
        kind = ["ORIGINAL", "PRIMARY", "LABEL", "NONE"]
        _write(files[-1], image[:_SIDE, :_SIDE], series, kind, mpp)
    return files


def write_annotation(path: Path, series: str) -> Path:
    """A DICOM file that is not a slide."""
    _save(path, _header(series, path, ANNOTATION_CLASS), ANNOTATION_CLASS)
    return path


def _write(path: Path, image: Bytes, series: str, kind: list[str] | None, mpp: float) -> None:
    found = _header(series, path, SLIDE_CLASS)
    found.ImageType = kind or ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
    found.Rows = found.Columns = _SIDE
    found.TotalPixelMatrixRows, found.TotalPixelMatrixColumns = image.shape[:2]
    found.TotalPixelMatrixFocalPlanes = 1
    found.SamplesPerPixel = 3
    found.PhotometricInterpretation = "YBR_FULL_422"
    found.PlanarConfiguration = 0
    found.BitsAllocated = found.BitsStored = 8
    found.HighBit = 7
    found.PixelRepresentation = 0
    found.DimensionOrganizationType = "TILED_FULL"
    measures, shared, optics = Dataset(), Dataset(), Dataset()
    measures.PixelSpacing = [mpp / 1000, mpp / 1000]
    shared.PixelMeasuresSequence = [measures]
    optics.ObjectiveLensPower = 10 / mpp
    found.SharedFunctionalGroupsSequence = [shared]
    found.OpticalPathSequence = [optics]
    frames = [jpeg(tile) for tile in tiles_of(image, _SIDE)]
    found.NumberOfFrames = len(frames)
    found.PixelData = encapsulate(frames)
    found["PixelData"].VR = "OB"
    found["PixelData"].is_undefined_length = True
    _save(path, found, SLIDE_CLASS)


def _header(series: str, path: Path, kind: str) -> Dataset:
    found = Dataset()
    found.SOPClassUID = kind
    found.SOPInstanceUID = uid(series, path.name)
    found.StudyInstanceUID = uid("study", series)
    found.SeriesInstanceUID = series
    found.Modality = "SM"
    return found


def _save(path: Path, found: Dataset, kind: str) -> None:
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = kind
    meta.MediaStorageSOPInstanceUID = found.SOPInstanceUID
    pictured = "PixelData" in found
    meta.TransferSyntaxUID = JPEGBaseline8Bit if pictured else ExplicitVRLittleEndian
    found.file_meta = meta
    found.save_as(path, enforce_file_format=True)
