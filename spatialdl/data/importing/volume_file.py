"""NIfTI files and TIFF stacks, opened by their headers and read box by box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tifffile

from spatialdl.data.image_source import Box, extents, pairs, whole_box

SUFFIXES = (".nii", ".nii.gz", ".tif", ".tiff")
_MILLIMETRES = {"unknown": 1.0, "mm": 1.0, "meter": 1e3, "micron": 1e-3}
_STACKS = {"ZYX", "QYX", "IYX"}

_Read = Callable[[tuple[slice, ...]], npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class StoredVolume:
    """A volume in a file, or in shards, with dims as they are stored there.

    Of NIfTI the last dim, which is usually from feet to head, comes first: (k, j, i) are slices,
    rows and columns.

    Attributes:
        size: (slices, rows, columns).
        channels: contrasts of NIfTI files of four dims, or of five with a fourth of 1.
        dtype: of the voxels as they are read.
        spacing: millimetres along these dims, if known.
        affine: (3, 4), which takes (slice, row, column, 1) to millimetres in RAS+, if known.
        voxels: reads a box that is not empty.
    """

    size: tuple[int, ...]
    channels: int
    dtype: np.dtype[Any]
    spacing: tuple[float, ...] | None
    affine: npt.NDArray[np.float64] | None
    voxels: Callable[[Box], npt.NDArray[Any]]

    def read(self, box: Box | None = None) -> npt.NDArray[Any]:
        """A box (slices, rows, columns, channels); others of the file take no memory.

        Of a compressed NIfTI file what lies before the box is decompressed and passed over.

        Args:
            box: half-open (slice0, slice1, row0, row1, col0, col1); None is the whole volume.

        Raises:
            Exception: whatever the decoder raises of a damaged file.
        """
        box = whole_box(self.size) if box is None else box
        if not all(extents(box)):  # nibabel fails to
            return np.empty((*extents(box), self.channels), self.dtype)
        return np.asarray(self.voxels(box), self.dtype)


@dataclass(eq=False)
class _File:
    """Reads boxes of a file, which each process opens when it first does."""

    path: Path

    def __call__(self, box: Box) -> npt.NDArray[Any]:
        return self._read(tuple(slice(*span) for span in pairs(box)))

    @cached_property
    def _read(self) -> _Read:
        return (_tiff_reader if _is_tiff(self.path) else _nifti_reader)(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}


def open_volume(path: Path) -> StoredVolume:
    """A NIfTI file, or a TIFF file of several pages of grey, which says nothing of spacing here.

    Raises:
        ValueError: nibabel is missing, or it is no volume; others if it is damaged.
    """
    if _is_tiff(path):
        with tifffile.TiffFile(path) as tiff:
            series = _stack(tiff)
            size, dtype = tuple(series.shape), np.dtype(series.dtype)
            return StoredVolume(size, 1, dtype, None, None, _File(path))
    image = load_nifti(path)
    size, channels = image.shape[2::-1], image.shape[3:]
    if len(size) < 3 or len(channels) > 2 or (len(channels) == 2 and channels[0] != 1):
        raise ValueError(
            f"it has shape {image.shape}, expected a volume of three dims, or channels"
        )
    if 0 in image.shape:
        raise ValueError(f"it has shape {image.shape}, and no voxels")
    spacing, affine = _geometry(image)
    many = int(np.prod(channels))
    return StoredVolume(size, many, _dtype(image), spacing, affine, _File(path))


def load_nifti(path: Path) -> Any:
    """The image of nibabel, of which the voxels are read later.

    Raises:
        ValueError: nibabel is missing; others if it is damaged.
    """
    try:
        import nibabel
    except ImportError:
        raise ValueError("NIfTI needs nibabel: pip install 'spatialdl[volumes]'") from None
    return nibabel.load(path, keep_file_open=True)


def is_volume(path: Path) -> bool:
    """Whether a file has the suffix of a volume, and is not hidden."""
    return path.name.lower().endswith(SUFFIXES) and path.name[0] != "."


def volume_name(path: Path) -> str:
    """The name of a file without its suffix, `.nii.gz` as a whole."""
    suffix = max((end for end in SUFFIXES if path.name.lower().endswith(end)), key=len, default="")
    return path.name[: len(path.name) - len(suffix)]


def _is_tiff(path: Path) -> bool:
    return path.suffix.lower() in (".tif", ".tiff")


def _dtype(image: Any) -> np.dtype[Any]:
    """The stored type in the byte order of this machine; float32 of integers with a slope."""
    stored = np.dtype(image.get_data_dtype()).newbyteorder("=")
    if stored.kind not in "iuf" or stored.itemsize > 8:
        raise ValueError(f"it has voxels of {stored}, expected integers or floats")
    plain = (image.dataobj.slope, image.dataobj.inter) == (1, 0)
    return stored if plain or stored == np.float64 else np.dtype(np.float32)


def _geometry(image: Any) -> tuple[tuple[float, ...], npt.NDArray[np.float64] | None]:
    scale = _MILLIMETRES[image.header.get_xyzt_units()[0]]
    if not (image.header["qform_code"] or image.header["sform_code"]):
        return tuple(float(x) * scale for x in image.header.get_zooms()[2::-1]), None
    affine = np.asarray(image.affine, np.float64)[:3, [2, 1, 0, 3]] * scale
    return tuple(np.linalg.norm(affine[:, :3], axis=0).tolist()), affine


def _nifti_reader(path: Path) -> _Read:
    image = load_nifti(path)
    more: Sequence[Any] = (0, slice(None)) if len(image.shape) == 5 else (slice(None),)

    def read(box: tuple[slice, ...]) -> npt.NDArray[Any]:
        at = (*box[::-1], *more[: len(image.shape) - 3])
        found = np.asanyarray(image.dataobj[at])
        return np.asarray((found if found.ndim == 4 else found[..., None]).transpose(2, 1, 0, 3))

    return read


def _tiff_reader(path: Path) -> _Read:
    tiff = tifffile.TiffFile(path)
    series = _stack(tiff)
    if len(series.pages) != series.shape[0]:  # one page stands for all, as ImageJ writes them
        voxels = series.asarray()
        return lambda box: voxels[box][..., None]

    def read(box: tuple[slice, ...]) -> npt.NDArray[Any]:
        pages = (series.pages[k].asarray()[box[1:]] for k in range(box[0].start, box[0].stop))
        shape = [span.stop - span.start for span in box]
        found = np.empty(shape, series.dtype)
        for number, page in enumerate(pages):
            found[number] = page
        return found[..., None]

    return read


def _stack(tiff: tifffile.TiffFile) -> Any:
    series = tiff.series[0]
    if len(tiff.series) > 1 or series.axes not in _STACKS:
        raise ValueError(f"it has {series.axes} of {series.shape}, expected pages of grey")
    return series
