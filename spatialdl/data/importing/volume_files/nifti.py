"""NIfTI files, read with nibabel.

Their last dim, which is usually from feet to head, comes first: (k, j, i) are slices, rows and
columns.
"""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.common.packages import needed
from spatialdl.data.importing.volume_files.volume import (
    Read,
    Reader,
    StoredVolume,
    affine_from,
    numbers_of,
)

_BLOCK = 2**20  # bytes
_MILLIMETRES = {0: 1.0, 1: 1e3, 2: 1.0, 3: 1e-3}
"""Of unknown units, metres, millimetres and micrometres, by the lowest bits of xyzt_units."""


def open_nifti(path: Path) -> StoredVolume:
    """Open a file of three dims; a fourth, or a fifth after one of size 1, is channels.

    Raises:
        ValueError: nibabel is missing, or it is not a volume; other errors if it is damaged.
    """
    image = load_nifti(path)
    size, channels = image.shape[2::-1], image.shape[3:]
    if len(size) < 3 or len(channels) > 2 or (len(channels) == 2 and channels[0] != 1):
        raise ValueError(
            f"it has shape {image.shape}, expected a volume of three dims, or channels"
        )
    if 0 in image.shape:
        raise ValueError(f"it has shape {image.shape}, which is no voxels")
    many, reader = int(np.prod(channels)), Reader(partial(_start, path))
    return StoredVolume(size, many, _dtype(image), *_geometry(image), reader)


def load_nifti(path: Path) -> Any:
    """Open an image with nibabel, which reads the voxels later.

    Raises:
        ValueError: nibabel is missing, or the header is not NIfTI; other errors if it is damaged.
    """
    nibabel = needed("nibabel", "volumes")
    try:
        return nibabel.load(path, keep_file_open=True)
    except nibabel.filebasedimages.ImageFileError as error:
        raise ValueError("it is damaged, or not a NIfTI file: copy or convert it again") from error


def _check_sum(path: Path) -> None:
    """Raise if the sum of a compressed file is wrong; nibabel stops before it."""
    if path.suffix.lower() == ".gz":
        with gzip.open(path) as file:
            while file.read(_BLOCK):
                pass


def _dtype(image: Any) -> np.dtype[Any]:
    """The stored type; float32 for integers with a slope."""
    stored = numbers_of(image.get_data_dtype())
    plain = (image.dataobj.slope, image.dataobj.inter) == (1, 0)
    return stored if plain or stored == np.float64 else np.dtype(np.float32)


def _geometry(image: Any) -> tuple[tuple[float, ...], npt.NDArray[np.float64] | None]:
    units = int(image.header["xyzt_units"])
    scale = _MILLIMETRES.get(units % 8)
    if scale is None:
        raise ValueError(f"it has xyzt_units {units}, whose spatial unit is not defined by NIfTI")
    if not (image.header["qform_code"] or image.header["sform_code"]):
        return tuple(float(x) * scale for x in image.header.get_zooms()[2::-1]), None
    *steps, origin = image.affine[:3, [2, 1, 0, 3]].T * scale
    return affine_from(steps, origin)


def _start(path: Path) -> Read:
    _check_sum(path)
    image = load_nifti(path)

    def read(box: tuple[slice, ...]) -> npt.NDArray[Any]:
        found = np.asarray(image.dataobj[(*box[::-1], ...)])
        return found.swapaxes(0, 2)

    return read
