"""Distributed volumes, written as NIfTI files.

Without compression, every rank writes its own box into the file. With compression, rank 0 gathers
one band of slices at a time.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from contextlib import nullcontext
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from spatialdl.comm.communicator import Communicator
from spatialdl.data.image_source import Size
from spatialdl.data.importing.volume_file import StoredVolume, load_nifti
from spatialdl.data.saving import unfinished
from spatialdl.predicting.pieces import MapPiece, PiecedMap

_BAND = 2**22  # voxels that rank 0 gathers at a time; at least a slice
_LEVEL = 1  # gzip level, as in nibabel: higher ones take far longer for little gain
_MOST_OF_NIFTI_1 = 2**15 - 1  # voxels along a dim, as sizes are int16
_GEOMETRY = (
    *("pixdim", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d"),
    *("qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z"),
)


def nifti_header(stored: StoredVolume, source: Path | None, dtype: np.dtype[Any]) -> bytes:
    """A NIfTI header with the geometry of a stored volume.

    Args:
        stored: the volume.
        source: its file, if there is one; the geometry of a NIfTI file is copied exactly.
        dtype: dtype of the voxels to write.
    """
    import nibabel

    large = max(stored.size) > _MOST_OF_NIFTI_1
    kind: Any = nibabel.Nifti2Header if large else nibabel.Nifti1Header
    header = kind()
    header.set_data_dtype(dtype)
    header.set_data_shape(stored.size[::-1])
    header.set_slope_inter(1, 0)
    if source is not None and source.name.lower().endswith((".nii", ".nii.gz")):
        known = load_nifti(source).header
        for name in _GEOMETRY:
            header[name] = known[name]
        header["pixdim"][4:] = 1
        header.set_xyzt_units(known.get_xyzt_units()[0])
    elif stored.affine is not None:
        affine = np.vstack([stored.affine[:, [2, 1, 0, 3]], (0, 0, 0, 1)])
        header.set_qform(affine, "scanner")
        header.set_sform(affine, "scanner")
        header.set_xyzt_units("mm")
    elif stored.spacing is not None:
        header.set_zooms(stored.spacing[::-1])
        header.set_xyzt_units("mm")
    out = BytesIO()
    header.write_to(out)
    return out.getvalue()


def save_nifti(
    path: Path,
    world: Communicator,
    header: bytes,
    size: Size,
    pieces: Sequence[MapPiece],
    dtype: np.dtype[Any],
) -> None:
    """Write a volume atomically; collective over `world`. Voxels outside pieces are 0.

    Args:
        path: compressed if it ends in .gz; otherwise on a file system shared by all ranks.
        header: on rank 0, see `nifti_header`.
        size: (slices, rows, columns).
        pieces: pieces of this rank, of one class.
        dtype: dtype of the voxels, to which values are cast.

    Raises:
        OSError: a rank cannot write.
    """
    with unfinished(path) if world.rank == 0 else nullcontext() as temporary:
        if path.name.endswith(".gz"):
            _write_bands(temporary, world, header, size, pieces, dtype)
            return
        if temporary is not None:
            with temporary.open("r+b") as file:
                file.write(header)
                file.truncate(len(header) + prod(size) * dtype.itemsize)
        problem = ""
        place, offset = world.bcast((temporary, len(header)))
        try:
            with place.open("r+b") as file:
                for piece in pieces:
                    _write_box(file.fileno(), offset, size, piece, dtype)
                os.fsync(file.fileno())  # data must reach the file system before the rename
        except OSError as error:
            problem = f"rank {world.rank} cannot write {path}: {error}"
        problems = [one for one in world.allgather(problem) if one]
        if problems:
            raise OSError(problems[0])


def _write_bands(
    temporary: Path | None,
    world: Communicator,
    header: bytes,
    size: Size,
    pieces: Sequence[MapPiece],
    dtype: np.dtype[Any],
) -> None:
    slices = max(1, _BAND // (size[1] * size[2]))
    bands = PiecedMap(world, size, pieces, size, empty=0.0).bands(0, slices)
    if temporary is None:
        for _ in bands:
            pass
        return
    with (
        temporary.open("r+b") as out,
        gzip.GzipFile("", "wb", _LEVEL, out, mtime=0) as compressed,
    ):
        compressed.write(header)
        for band in bands:
            compressed.write(band.astype(dtype).tobytes())


def _write_box(file: int, offset: int, size: Size, piece: MapPiece, dtype: np.dtype[Any]) -> None:
    """Write a box; voxels contiguous in the file are written at once."""
    box = piece.values[0].numpy().astype(dtype, copy=False)
    run = 3 if box.shape[1:] == tuple(size[1:]) else 2 if box.shape[2] == size[2] else 1
    for outer in np.ndindex(*box.shape[: 3 - run]):
        first = [a + b for a, b in zip(piece.start, (*outer, 0, 0, 0), strict=False)]
        at = offset + int(np.ravel_multi_index(first, size)) * dtype.itemsize
        left = memoryview(box[outer].tobytes())
        while left:
            written = os.pwrite(file, left, at)
            left, at = left[written:], at + written
