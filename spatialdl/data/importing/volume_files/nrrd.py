"""NRRD files with attached or detached headers, which pynrrd parses.

Their last spatial axis comes first, as with NIfTI. The voxels of a file are read all at once.
"""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.common.files import file_status
from spatialdl.common.packages import needed
from spatialdl.data.importing.volume_files.volume import (
    Read,
    Reader,
    StoredVolume,
    affine_from,
    millimetres,
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


def open_nrrd(path: Path) -> StoredVolume:
    """Open a file with three spatial axes, and optionally one channel axis at any position.

    Raises:
        ValueError: pynrrd is missing, or it is not a volume; other errors if damaged.
    """
    with path.open("rb") as file:
        header = needed("nrrd", "volumes").read_header(file)
    header = {key.replace(" ", ""): value for key, value in header.items()}
    shape = tuple(int(n) for n in header["sizes"])
    if not shape or min(shape) < 1:
        raise ValueError(f"it has sizes {shape}, which is no voxels")
    if "%" in (detached := str(header.get("datafile", ""))) or detached.startswith("LIST"):
        raise ValueError(f"its data are in several files ({detached}); save it as one")
    if detached:
        file_status(path.parent, detached)
    order = _order(header, shape)
    size = tuple(shape[axis] for axis in order[:3])
    channels = prod(shape[axis] for axis in order[3:])
    geometry, reader = _geometry(header, order[:3]), Reader(partial(_start, path, order))
    return StoredVolume(size, channels, numbers_of(_dtype(header)), *geometry, reader)


def _dtype(header: dict[str, Any]) -> np.dtype[Any]:
    """Type from C or stdint.h names."""
    name = str(header["type"]).removeprefix("signed ").replace("unsigned ", "u")
    name = name.removesuffix(" int").removesuffix("_t").replace(" ", "")
    try:
        dtype = np.dtype(_TYPES.get(name, name))
    except TypeError:
        raise ValueError(f"it has voxels of {header['type']}, expected numbers") from None
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


def _start(path: Path, order: tuple[int, ...]) -> Read:
    voxels, _ = needed("nrrd", "volumes").read(str(path))
    voxels = np.asarray(voxels).transpose(order)
    return lambda box: voxels[box]
