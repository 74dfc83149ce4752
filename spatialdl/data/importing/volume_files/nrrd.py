"""NRRD files with attached or detached headers, which pynrrd parses.

Their last spatial axis comes first, as with NIfTI.
"""

from __future__ import annotations

import bz2
import gzip
import io
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.data.importing.volume_files.volume import (
    Read,
    Reader,
    StoredVolume,
    affine_from,
    millimetres,
    needed,
    numbers_of,
)

_KINDS = {"domain", "space", "none", "???"}  # kinds of axes that may be spatial
_TYPES = {
    **{"char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4"},
    **{"longlong": "i8", "ulonglong": "u8", "float": "f4", "double": "f8"},
}
_TO_RAS = {
    **dict.fromkeys(("right-anterior-superior", "ras"), (1, 1, 1)),
    **dict.fromkeys(("left-anterior-superior", "las"), (-1, 1, 1)),
    **dict.fromkeys(("left-posterior-superior", "lps"), (-1, -1, 1)),
}


@dataclass(frozen=True)
class _Data:
    """Location and layout of the voxels.

    Attributes:
        path: the file with the voxels.
        start: offset of their first byte, or of the compressed stream.
        skip: bytes of the decompressed stream before them.
        encoding: "raw", "gzip" or "bzip2".
        shape: sizes of all axes; the first varies fastest.
        dtype: stored type.
        order: axes of slices, rows, columns and perhaps channels.
    """

    path: Path
    start: int
    skip: int
    encoding: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: tuple[int, ...]


def open_nrrd(path: Path) -> StoredVolume:
    """Open a file with three spatial axes, and optionally one channel axis at any position.

    Raises:
        ValueError: pynrrd or nibabel is missing, or it is not a volume; other errors if damaged.
    """
    nrrd = needed("nrrd")
    with path.open("rb") as file:
        header = {key.replace(" ", ""): value for key, value in nrrd.read_header(file).items()}
        data = _data(path, header, file.tell())
    size = tuple(data.shape[axis] for axis in data.order[:3])
    channels = prod(data.shape[axis] for axis in data.order[3:])
    geometry, reader = _geometry(header, data.order[:3]), Reader(partial(_start, data))
    return StoredVolume(size, channels, numbers_of(data.dtype), *geometry, reader)


def _data(path: Path, header: dict[str, Any], end: int) -> _Data:
    shape, encoding = tuple(int(n) for n in header["sizes"]), str(header["encoding"]).lower()
    encoding = {"gz": "gzip", "bz2": "bzip2"}.get(encoding, encoding)
    if encoding not in ("raw", "gzip", "bzip2"):
        raise ValueError(f"it has encoding {encoding}, expected raw, gzip or bzip2")
    if not shape or min(shape) < 1:
        raise ValueError(f"it has sizes {shape}, which is no voxels")
    detached = header.get("datafile")
    start = end
    if detached is not None:
        if not isinstance(detached, str) or detached.startswith("LIST") or "%" in detached:
            raise ValueError(f"its data are in several files ({detached}); save it as one")
        path, start = path.parent / detached, 0
    start = _behind_lines(path, start, int(header.get("lineskip", 0)))
    dtype, skip = _dtype(header), int(header.get("byteskip", 0))
    if skip < 0 and encoding == "raw":
        start, skip = path.stat().st_size - prod(shape) * dtype.itemsize, 0
    if skip < 0 or start < 0:
        raise ValueError(
            f"it has byte skip {skip}, but its data file has {path.stat().st_size} bytes"
        )
    return _Data(path, start, skip, encoding, shape, dtype, _order(header, shape))


def _behind_lines(path: Path, start: int, lines: int) -> int:
    with path.open("rb") as file:
        file.seek(start)
        for _ in range(lines):
            file.readline()
        return file.tell()


def _dtype(header: dict[str, Any]) -> np.dtype[Any]:
    """Type from C or stdint.h names."""
    name = str(header["type"]).removeprefix("signed ").replace("unsigned ", "u")
    name = name.removesuffix(" int").removesuffix("_t").replace(" ", "")
    try:
        dtype = np.dtype(_TYPES.get(name, name))
    except TypeError:
        raise ValueError(f"it has voxels of {header['type']}, expected numbers") from None
    if dtype.itemsize > 1 and "endian" not in header:
        raise ValueError("its header lacks endian, the byte order")
    return dtype.newbyteorder(">" if header.get("endian") == "big" else "<")


def _order(header: dict[str, Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of slices, rows and columns, and perhaps channels."""
    kinds = header.get("kinds", ["domain"] * len(shape))
    spatial = [axis for axis, kind in enumerate(kinds) if str(kind).lower() in _KINDS]
    directions = header.get("spacedirections")
    if directions is not None:
        spatial = [axis for axis in spatial if _known(directions[axis])]
    elif len(spatial) == 4 and len(header.get("spacings", ())) == 4:
        spatial = [axis for axis in spatial if np.isfinite(header["spacings"][axis])]
    others = [axis for axis in range(len(shape)) if axis not in spatial]
    if len(spatial) != 3 or prod(shape[axis] for axis in others if kinds[axis] == "time") > 1:
        shown = f"sizes {shape} and kinds {', '.join(map(str, kinds))}"
        raise ValueError(f"it has {shown}, expected three spatial axes, or channels beside them")
    if len(others) > 1:
        raise ValueError(f"it has sizes {shape}, expected at most one axis beside the spatial ones")
    return (*spatial[::-1], *others)


def _known(direction: Any) -> bool:
    return direction is not None and bool(np.isfinite(np.asarray(direction, np.float64)).all())


def _geometry(
    header: dict[str, Any], order: tuple[int, ...]
) -> tuple[tuple[float, ...] | None, npt.NDArray[np.float64] | None]:
    """Spacing; and the affine, if the space is anatomical."""
    directions, units = header.get("spacedirections"), header.get("spaceunits", ["mm"])
    if directions is None:
        spacings = header.get("spacings")
        lengths = [] if spacings is None else [float(spacings[axis]) for axis in order]
        scales = [millimetres(one) for one in header.get("units", ()) if one] or [1.0]
        known = lengths and np.isfinite(lengths).all() and min(lengths) > 0
        if not known or scales[0] is None or len(set(scales)) > 1:
            return None, None
        return tuple(length * scales[0] for length in lengths), None
    scale = millimetres(units[0]) if len(set(units)) == 1 else None
    if scale is None:
        return None, None
    steps = [np.asarray(directions[axis], np.float64) * scale for axis in order]
    signs = _TO_RAS.get(str(header.get("space", "")).lower())
    origin = header.get("spaceorigin")
    if signs is None or not _known(origin):
        return tuple(float(np.linalg.norm(step)) for step in steps), None
    return affine_from([step * signs for step in steps], np.asarray(origin) * scale * signs)


def _start(data: _Data) -> Read:
    fileslice = needed("nibabel.fileslice").fileslice
    file: Any = io.BufferedReader(_Behind(data.path, data.start))
    if data.encoding != "raw":
        file = gzip.GzipFile(fileobj=file) if data.encoding == "gzip" else bz2.BZ2File(file)

    def read(box: tuple[slice, ...]) -> npt.NDArray[Any]:
        at = [slice(None)] * len(data.shape)
        for axis, span in zip(data.order, box, strict=False):
            at[axis] = span
        found = fileslice(file, tuple(at), data.shape, data.dtype, data.skip, "F")
        return np.asarray(found).transpose(data.order)

    return read


class _Behind(io.FileIO):
    """A file from an offset on: decompressors rewind to the start."""

    def __init__(self, path: Path, start: int) -> None:
        super().__init__(path)
        self._start = start
        self.seek(0)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return super().seek(offset + self._start * (whence == io.SEEK_SET), whence) - self._start

    def tell(self) -> int:
        return super().tell() - self._start
