"""A volume in a file or folder, opened by its headers and read box by box."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from gzip import BadGzipFile
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from spatialdl.data.image_source import Box, extents, pairs, whole_box

Read = Callable[[tuple[slice, ...]], npt.NDArray[Any]]
"""Maps slices of (slices, rows, columns) to an array (slices, rows, columns[, channels])."""

_UNITS: dict[float, str] = {  # symbols in OME-XML, names in OME-Zarr
    1e6: "km kilometer",
    1e3: "m meter metre",
    25.4: "in inch",
    10.0: "cm centimeter centimetre",
    1.0: "mm millimeter millimetre",
    1e-3: "\N{MICRO SIGN}m \N{GREEK SMALL LETTER MU}m um micrometer micrometre micron",
    1e-6: "nm nanometer nanometre",
    1e-7: "\N{LATIN CAPITAL LETTER A WITH RING ABOVE} \N{ANGSTROM SIGN} angstrom",
    1e-9: "pm picometer picometre",
}
_MILLIMETRES = {unit: length for length, units in _UNITS.items() for unit in units.split()}


@dataclass(frozen=True, eq=False)
class StoredVolume:
    """A volume in a file, or in shards, with dims in stored order.

    Attributes:
        size: (slices, rows, columns).
        channels: 1, or the number of contrasts or stains.
        dtype: type of the voxels when read.
        spacing: millimetres along these dims, if known.
        affine: (3, 4), which maps (slice, row, column, 1) to millimetres in RAS+, if known.
        voxels: reads a non-empty box.
    """

    size: tuple[int, ...]
    channels: int
    dtype: np.dtype[Any]
    spacing: tuple[float, ...] | None
    affine: npt.NDArray[np.float64] | None
    voxels: Callable[[Box], npt.NDArray[Any]]

    def read(self, box: Box | None = None) -> npt.NDArray[Any]:
        """Read a box (slices, rows, columns, channels), without loading the rest of the file.

        In a compressed NIfTI file the data before the box is decompressed and skipped; NRRD is
        loaded as a whole.

        Args:
            box: half-open (slice0, slice1, row0, row1, col0, col1); None is the whole volume.

        Raises:
            Exception: any error of the decoder for a damaged file.
        """
        box = whole_box(self.size) if box is None else box
        if not all(extents(box)):  # nibabel fails for empty boxes
            return np.empty((*extents(box), self.channels), self.dtype)
        try:
            found = np.asarray(self.voxels(box), self.dtype)
        except (EOFError, BadGzipFile, zlib.error) as error:
            raise EOFError(f"it is damaged or incomplete ({error}): copy it again") from error
        return found.reshape(*extents(box), self.channels)


@dataclass(eq=False)
class Reader:
    """Reads boxes of a file.

    Attributes:
        start: opens the file, in each process that reads.
    """

    start: Callable[[], Read]

    def __call__(self, box: Box) -> npt.NDArray[Any]:
        return self._read(tuple(slice(*span) for span in pairs(box)))

    @cached_property
    def _read(self) -> Read:
        return self.start()

    def __getstate__(self) -> dict[str, Any]:
        return {"start": self.start}


def millimetres(unit: str) -> float | None:
    """Millimetres of a unit, by its name or symbol; None if it is not a length."""
    return _MILLIMETRES.get(unit)


def ome_spacing(text: str, axes: str = "ZYX") -> tuple[float, ...] | None:
    """Millimetres between neighbours along axes of OME-XML; None if one of them has no length.

    Raises:
        ElementTree.ParseError: it is no XML.
    """
    pixels = ElementTree.fromstring(text).find(".//{*}Pixels")
    if pixels is None:  # it is in another file
        return None
    found = []
    for axis in axes:
        unit = millimetres(pixels.get(f"PhysicalSize{axis}Unit", "\N{MICRO SIGN}m"))
        length = float(pixels.get(f"PhysicalSize{axis}", "nan"))
        if unit is None or not 0 < length < np.inf:
            return None
        found.append(length * unit)
    return tuple(found)


def numbers_of(stored: npt.DTypeLike) -> np.dtype[Any]:
    """Type of stored voxels in native byte order; uint8 for booleans.

    Raises:
        ValueError: neither integers nor floats.
    """
    dtype = np.dtype(stored).newbyteorder("=")
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise ValueError(f"it has voxels of {dtype}, expected integers or floats")
    return dtype


def affine_from(
    steps: Sequence[npt.ArrayLike], origin: npt.ArrayLike
) -> tuple[tuple[float, ...], npt.NDArray[np.float64]]:
    """Compute spacing and affine.

    Args:
        steps: millimetres in RAS+ between neighbouring slices, rows and columns.
        origin: position of the first voxel.

    Raises:
        ValueError: the steps do not span a volume.
    """
    affine = np.column_stack([np.asarray(one, np.float64) for one in (*steps, origin)])
    spacing = np.linalg.norm(affine[:, :3], axis=0)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:, :3])) <= 1e-6 * spacing.prod():
        raise ValueError(f"its slices, rows and columns lie in one plane: {affine[:, :3].tolist()}")
    return tuple(spacing.tolist()), affine
