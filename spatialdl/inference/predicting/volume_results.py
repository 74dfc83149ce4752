"""The maps of a volume, written as NIfTI files with the volume's geometry.

NAME-classes.nii   the most probable class of every voxel
NAME-CLASS.nii     the probability of a class
NAME-slices.png    three orthogonal slices through the centre, and the classes over them

Of a network that predicts a class per volume, with activation=true:

NAME-CLASS-activation.nii   contribution of each place to the logit of a class; 0 outside the
                            network's input
NAME-activation.png         the slices, and the activation of the most probable class over them

Files are compressed, NAME-classes.nii.gz, if the volume is: rank 0 gathers one band of slices at a
time then, otherwise every rank writes its own box into the file.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.common.files import unfinished
from spatialdl.common.text import fitted
from spatialdl.data.augmentation.geometry import Draw, window_of
from spatialdl.data.image_source import Box, Size, pairs, whole_box
from spatialdl.data.importing.volume_file import StoredVolume, load_nifti
from spatialdl.data.volume_geometry import VolumeTurn
from spatialdl.inference.predicting.inputs import Input
from spatialdl.inference.predicting.loop import agreeing
from spatialdl.inference.predicting.maps import MapClasses, MapFolder, class_files
from spatialdl.inference.predicting.pictures import (
    add_heat_bar,
    add_legend,
    new_figure,
    save_figure,
)
from spatialdl.inference.predicting.pieces import MapPiece, PiecedMap
from spatialdl.inference.predicting.running import SlideOutput
from spatialdl.inference.predicting.volume_inputs import VolumeImages
from spatialdl.inference.predicting.volume_pictures import (
    COLOURS,
    PlanePart,
    cut_planes,
    draw_planes,
    join_planes,
    window_in,
)

Array = npt.NDArray[Any]

_BAND = 2**22  # voxels that rank 0 gathers at a time; at least a slice
_LEVEL = 1  # gzip level, as in nibabel: higher ones take far longer for little gain
_MOST_OF_NIFTI_1 = 2**15 - 1  # voxels along a dim, as sizes are int16
_GEOMETRY = (
    *("pixdim", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d"),
    *("qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z"),
)


def save_volume_maps(
    where: MapFolder,
    given: Input,
    outcome: SlideOutput,
    classes: MapClasses,
    world: Communicator,
) -> None:
    """Write all maps of a volume; collective over `world`."""
    assert isinstance(given.source, VolumeImages)
    if classes.task == "segmentation":
        _save_map(where, given.source, given, outcome.pieces, classes, world)
    elif outcome.activation is not None and outcome.values is not None:
        probabilities = outcome.values[0].tolist()
        _save_activation(where, given.source, given, outcome.activation[0], probabilities, classes)


def _save_map(
    where: MapFolder,
    source: VolumeImages,
    given: Input,
    predicted: Sequence[MapPiece],
    classes: MapClasses,
    world: Communicator,
) -> None:
    pieces = [_as_stored(piece, source.turn, given.size) for piece in predicted]
    best = [MapPiece(one.start, one.values.argmax(0, keepdim=True)) for one in pieces]
    *names, name = class_files([*classes.names, "classes"])
    kind = np.dtype(np.uint8 if len(names) <= 256 else np.uint16)
    _save(where, given, source, name, best, kind, world)
    double = world.allgather(any(one.values.dtype == torch.float64 for one in pieces))
    kind = np.dtype(np.float64 if any(double) else np.float32)
    for number in classes.shown:
        own = [MapPiece(one.start, one.values[number : number + 1]) for one in pieces]
        _save(where, given, source, names[number], own, kind, world)
    size = source.stored.size
    parts = world.gather([_cut(one, size) for one in best])
    path = where.path("-slices.png")
    if parts is not None:
        planes = join_planes([part for one in parts for part in one], size)
        _draw(path, source.stored, given.name, classes.names, classes=planes)


def _save_activation(
    where: MapFolder,
    source: VolumeImages,
    given: Input,
    values: Array,
    probabilities: Sequence[float],
    classes: MapClasses,
) -> None:
    """Write activation maps from `values` (classes, *spatial), on rank 0, class by class.

    The network's input may be a crop of the volume's centre, or the volume with padding.
    """
    turn, seen = source.turn, source.image_size(0)
    under = window_of(Draw(), seen, given.size).source_box(whole_box(given.size))
    box, size = turn.stored_box(under, seen), source.stored.size
    names = class_files(classes.names)
    most = max(classes.shown, key=lambda number: probabilities[number])
    for number in classes.shown:
        piece, ending = (
            _spread(turn.stored(values[number]), box, size),
            f"{names[number]}-activation",
        )
        _save(where, given, source, ending, [piece], values.dtype, SingleProcess())
        if number == most:
            heat = join_planes([_cut(piece, size)], size)
    title = f"{given.name}: {classes.names[most]}"
    _draw(where.path("-activation.png"), source.stored, title, (), heat=heat)


def _as_stored(piece: MapPiece, turn: VolumeTurn, size: Size) -> MapPiece:
    """A piece of the map of a volume of `size`, in the orientation of the file."""
    if turn == VolumeTurn():
        return piece
    stored = turn.stored_box(piece.box, size)
    values = np.stack([turn.stored(one.numpy()) for one in piece.values])
    return MapPiece(tuple(stored[::2]), torch.from_numpy(values))


def _save(
    where: MapFolder,
    given: Input,
    source: VolumeImages,
    ending: str,
    pieces: Sequence[MapPiece],
    dtype: np.dtype[Any],
    world: Communicator,
) -> None:
    stored, file = source.stored, given.slide
    compressed = file is not None and file.name.lower().endswith(".gz")
    header = nifti_header(stored, file, dtype) if world.rank == 0 else b""
    path = where.path(f"-{ending}.nii{'.gz' * compressed}")
    save_nifti(path, world, header, stored.size, pieces, dtype)


def _spread(values: Array, box: Box, size: Size) -> MapPiece:
    """Upsample a coarse map over a box to the voxels of it inside a volume of `size`."""
    start, at = [], []
    for (first, stop), n, places in zip(pairs(box), size, values.shape, strict=True):
        inside = np.arange(max(first, 0), min(stop, n))
        at.append((2 * (inside - first) + 1) * places // (2 * (stop - first)))
        start.append(max(first, 0))
    return MapPiece(tuple(start), torch.from_numpy(values[np.ix_(*at)])[None])


def _cut(piece: MapPiece, size: Size) -> list[PlanePart | None]:
    """The planes of the first class of a piece of a map over a volume of `size`."""
    values = piece.values[0].numpy()
    return cut_planes(lambda box: values[window_in(box, piece.box)], piece.box, size)


def _draw(
    path: Path,
    stored: StoredVolume,
    title: str,
    names: Sequence[str],
    classes: Sequence[Array] | None = None,
    heat: Sequence[Array] | None = None,
) -> None:
    """Draw the slices without and with overlay, and a legend of classes or the scale of heat."""
    size = stored.size
    parts = cut_planes(lambda box: stored.read(box)[..., 0], whole_box(size), size)
    draw = partial(draw_planes, join_planes([parts], size), stored.spacing, stored.affine)
    drawn = [draw(), draw(classes, heat)]
    rows, cols = drawn[0].shape[:2]
    down, across = (1, 2) if 2 * rows > cols else (2, 1)
    figure = new_figure(7.0 * across, 7.0 * down * rows / cols + 1)
    panels = figure.subplots(down, across)
    for panel, picture in zip(panels, drawn, strict=True):
        panel.imshow(picture, interpolation="nearest")
        panel.set_axis_off()
    if heat is not None:
        label = "contribution to the class, relative to the largest"
        add_heat_bar(figure, panels, label)
    colours = {name: COLOURS[k % len(COLOURS)] / 255 for k, name in enumerate(names[1:])}
    add_legend(figure, colours)
    figure.suptitle(fitted(title, 60), fontsize=11)
    save_figure(path, figure)


# --- NIfTI


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
        OSError, AgreedError: a rank cannot write.
    """
    with unfinished(path) if world.rank == 0 else nullcontext() as temporary:
        if path.name.endswith(".gz"):
            _write_bands(temporary, world, header, size, pieces, dtype)
            return
        if temporary is not None:
            with temporary.open("r+b") as file:
                file.write(header)
                file.truncate(len(header) + prod(size) * dtype.itemsize)
        place, offset = world.bcast((temporary, len(header)))
        with agreeing(world), place.open("r+b") as file:
            for piece in pieces:
                _write_box(file.fileno(), offset, size, piece, dtype)
            os.fsync(file.fileno())  # data must reach the file system before the rename


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
