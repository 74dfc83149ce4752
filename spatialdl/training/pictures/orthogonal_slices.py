"""Pictures of volumes: the three orthogonal slices through the middle, classes in colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from spatialdl.data.image_source import Box, pairs
from spatialdl.data.volume_geometry import Turn
from spatialdl.training.pictures.heat_maps import heated
from spatialdl.training.pictures.thumbnails import SIDE, Patch, joined, overlaid

Array = npt.NDArray[Any]
Picture = npt.NDArray[np.uint8]

_GAP = 4  # pixels between two slices
_DARKEST, _BRIGHTEST = 0.5, 99.5  # percentiles that become black and white


class Planes(NamedTuple):
    """The slices through the middle of a volume of (depth, height, width).

    Attributes:
        axial: (height, width).
        coronal: (depth, width).
        sagittal: (depth, height).
    """

    axial: Array
    coronal: Array
    sagittal: Array


def orthogonal_slices(
    volume: Array,
    spacing: Sequence[float] | None = None,
    classes: Array | None = None,
    *,
    side: int = SIDE,
) -> Picture:
    """Draw a volume, of which this process has all voxels; see `draw_planes`.

    Args:
        volume: (depth, height, width) of integers, floats or booleans.
        spacing: of its voxels along these dims in millimetres; None draws cubes.
        classes: whole numbers of the same shape.
        side: pixels of the longest edge of the volume.
    """
    overlay = None if classes is None else planes_of(classes)
    return draw_planes(planes_of(volume), spacing, overlay, side=side)


def planes_of(volume: Array) -> Planes:
    """The slices through the middle of a volume (depth, height, width)."""
    depth, height, width = (n // 2 for n in volume.shape)
    return Planes(volume[depth], volume[:, height], volume[:, :, width])


def turned(planes: Planes, turn: Turn) -> Planes:
    """The same slices of the volume as a turn shows it."""
    found = []
    for dim, stored in enumerate(turn.dims):
        rest = [other for other in range(3) if other != dim]
        plane = planes[stored]
        if turn.dims[rest[0]] > turn.dims[rest[1]]:
            plane = plane.T
        backwards = tuple(k for k, other in enumerate(rest) if other in turn.reversed)
        found.append(np.flip(plane, backwards))
    return Planes(*found)


def plane_patches(values: Array, box: Box, size: Sequence[int]) -> list[Patch | None]:
    """What a rank has of the slices, for `joined_planes`; None of those beside its box.

    Args:
        values: (depth, height, width) of the box.
        box: of the rank in a volume of `size`.
        size: (depth, height, width).
    """
    found: list[Patch | None] = []
    spans = pairs(box)
    for dim, (start, stop) in enumerate(spans):
        inside = start <= size[dim] // 2 < stop and values.size > 0
        row, col = (span[0] for other, span in enumerate(spans) if other != dim)
        plane = values.take(size[dim] // 2 - start, dim) if inside else None
        found.append(None if plane is None else Patch(row, col, plane))
    return found


def joined_planes(patches: Sequence[Sequence[Patch | None]], size: Sequence[int]) -> Planes:
    """The slices of a volume of `size`, of the `plane_patches` of all ranks."""
    found = []
    for dim, own in enumerate(zip(*patches, strict=True)):
        shape = [n for other, n in enumerate(size) if other != dim]
        found.append(joined([patch for patch in own if patch is not None], tuple(shape)))
    return Planes(*found)


def draw_planes(
    planes: Planes,
    spacing: Sequence[float] | None = None,
    classes: Planes | None = None,
    heat: Planes | None = None,
    *,
    side: int = SIDE,
) -> Picture:
    """Draw slices side by side as RGB (rows, columns, 3), all in one scale of millimetres.

    All three have the same window, from black at the darkest voxels to white at the brightest;
    voxels that are no finite numbers are black. Class 0, and voxels without a class, stay grey.

    Args:
        planes: of the voxels.
        spacing: along (depth, height, width) in millimetres; None draws cubes.
        classes: to be laid over the voxels in colours.
        heat: values to be laid over the voxels, all in one scale, see `heated`.
        side: pixels of the longest edge of the volume.
    """
    depth, height, width = (1.0, 1.0, 1.0) if spacing is None else spacing
    edges = ((height, width), (depth, width), (depth, height))
    extents = [
        tuple(n * edge for n, edge in zip(plane.shape, voxel, strict=True))
        for plane, voxel in zip(planes, edges, strict=True)
    ]
    zoom = side / max(length for extent in extents for length in extent)
    drawn = []
    for number, (plane, extent) in enumerate(zip(_grey(planes), extents, strict=True)):
        rows, cols = (max(1, round(length * zoom)) for length in extent)
        image = Image.fromarray(plane).resize((cols, rows), Image.Resampling.BOX)
        shown = np.repeat(np.asarray(image)[..., None], 3, axis=2)
        if classes is not None:
            shown = overlaid(shown, _nearest(classes[number], rows, cols))
        if heat is not None:
            shown = heated(shown, heat[number], max(plane.max() for plane in heat))
        drawn.append(shown)
    return _side_by_side(drawn)


def _grey(planes: Planes) -> list[Picture]:
    """The voxels as uint8, windowed over all three planes."""
    values = [plane.astype(np.float64) for plane in planes]
    flat = np.concatenate([plane.ravel() for plane in values])
    known = flat[np.isfinite(flat)]
    if not known.size:
        return [np.zeros(plane.shape, np.uint8) for plane in values]
    low, high = np.percentile(known, (_DARKEST, _BRIGHTEST))
    if low == high:  # nearly all voxels are alike
        low, high = known.min(), known.max()
    width = high - low if high > low else 1.0
    found = []
    for plane in values:
        shares = np.where(np.isfinite(plane), (plane - low) / width, 0.0)
        found.append(np.asarray((255 * shares.clip(0, 1)).round(), np.uint8))
    return found


def _nearest(classes: Array, rows: int, cols: int) -> Array:
    at = [
        (2 * np.arange(many) + 1) * few // (2 * many)
        for many, few in zip((rows, cols), classes.shape, strict=True)
    ]
    shown: Array = classes[at[0][:, None], at[1][None, :]]
    return shown


def _side_by_side(pictures: Sequence[Picture]) -> Picture:
    """On black, with gaps between."""
    rows = max(len(one) for one in pictures)
    cols = sum(one.shape[1] for one in pictures) + _GAP * (len(pictures) - 1)
    canvas, col = np.zeros((rows, cols, 3), np.uint8), 0
    for one in pictures:
        canvas[: len(one), col : col + one.shape[1]] = one
        col += one.shape[1] + _GAP
    return canvas
