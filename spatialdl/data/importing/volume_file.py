"""Choice of the volume reader by path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from spatialdl.common.files import VOLUMES, volume_name, volume_suffix
from spatialdl.data.importing.volume_files.dicom import DicomFolder, find_series
from spatialdl.data.importing.volume_files.nifti import load_nifti, open_nifti
from spatialdl.data.importing.volume_files.nrrd import open_nrrd
from spatialdl.data.importing.volume_files.ome_zarr import open_ome_zarr
from spatialdl.data.importing.volume_files.tiff import open_tiff
from spatialdl.data.importing.volume_files.volume import StoredVolume

__all__ = [
    "SUFFIXES",
    "StoredVolume",
    "is_volume",
    "load_nifti",
    "open_volume",
    "volume_name",
    "volumes_in",
]

_OPEN = {"nifti": open_nifti, "nrrd": open_nrrd, "tiff": open_tiff, "zarr": open_ome_zarr}
_READERS: dict[str, Callable[[Path], StoredVolume]] = {
    suffix: _OPEN[kind] for kind, suffixes in VOLUMES.items() for suffix in suffixes
}
SUFFIXES = tuple(_READERS)
"""Suffixes of files, and of OME-Zarr folders; DICOM is recognised by content."""


UNREAD = (".mgz", ".mgh", ".mha", ".mhd", ".mnc", ".hdr", ".head", ".par", ".brik.gz", ".brik")
"""Suffixes of volumes in unsupported formats."""


def open_volume(path: Path) -> StoredVolume:
    """Open NIfTI, NRRD, a TIFF stack, OME-TIFF, OME-Zarr, or one DICOM series (folder or file).

    Raises:
        ValueError: a package is missing, or it is not a volume; other errors if it is damaged.
    """
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError("it is an empty file (0 bytes): copy it again")
    if suffix := volume_suffix(path):
        return _READERS[suffix](path)
    found = list(find_series(path if path.is_dir() else path.parent, [path]).series.values())
    if len(found) != 1:
        raise ValueError(
            f"it has {len(found)} DICOM series ({', '.join(one.uid for one in found) or 'none'}), "
            "expected one"
        )
    return found[0].open()


def is_volume(path: Path) -> bool:
    """Whether a file or store has the suffix of a volume, and is not hidden."""
    return bool(volume_suffix(path)) and path.name[0] != "."


def volumes_in(folder: Path) -> tuple[list[Path], DicomFolder]:
    """The files and stores of a folder, and the DICOM series at any depth."""
    inside = [path for path in sorted(folder.iterdir()) if path.name[0] != "."]
    others = [path for path in inside if not is_volume(path)]
    return list(filter(is_volume, inside)), find_series(folder, others)
