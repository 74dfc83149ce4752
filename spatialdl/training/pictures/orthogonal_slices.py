"""Pictures of volumes: three orthogonal slices through the middle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from spatialdl.data.volume_geometry import Geometry, VolumeTurn
from spatialdl.training.pictures.thumbnails import SIDE, heated, overlaid, thumbnail_size

Array = npt.NDArray[Any]
Picture = npt.NDArray[np.uint8]

_DRAWN = Geometry("IPL")  # head up, anterior up or left, right side left
_GAP = 4  # pixels between two slices
_DARKEST, _BRIGHTEST = 0.5, 99.5  # percentiles of black and white


class Planes(NamedTuple):
    """Slices through the middle of a volume of (depth, height, width).

    Attributes:
        axial: (height, width).
        coronal: (depth, width).
        sagittal: (depth, height).
    """

    axial: Array
    coronal: Array
    sagittal: Array


def draw_sections(
    size: Sequence[int],
    grey: Sequence[Array],
    spacing: Sequence[float] | None = None,
    affine: npt.ArrayLike | None = None,
    classes: Sequence[Array] | None = None,
    heat: Sequence[Array] | None = None,
    *,
    side: int = SIDE,
) -> Picture:
    """Draw thumbnails of the sections of a volume, see `thumbnails.sections` and `draw_planes`.

    With a known affine, the patient's head and front are up and the right side is left.

    Args:
        size: (depth, height, width) of the volume.
        grey: (rows, columns, channels) per section; the first channel is drawn.
        spacing: spacing of the voxels in millimetres; None draws cubes.
        affine: (3, 4), from (slice, row, column) to millimetres in RAS+.
        classes: (rows, columns) per section, drawn in colours.
        heat: (rows, columns) per section, drawn as a heat map.
        side: pixels of the longest edge of the volume.
    """
    turn = _DRAWN.turn(affine)
    voxels = zip(size, spacing or (1.0,) * 3, thumbnail_size(size), strict=True)
    pixels = turn.seen_size([n * length / few for n, length, few in voxels])
    shown = turned(Planes(*(one[..., 0] for one in grey)), turn)
    over, warm = (None if one is None else turned(Planes(*one), turn) for one in (classes, heat))
    return draw_planes(shown, pixels, over, warm, side=side)


def turned(planes: Planes, turn: VolumeTurn) -> Planes:
    """Reorient the slices of a volume."""
    slices = []
    for dim, stored in enumerate(turn.dims):
        rest = [other for other in range(3) if other != dim]
        plane = planes[stored]
        if turn.dims[rest[0]] > turn.dims[rest[1]]:
            plane = plane.T
        backwards = tuple(k for k, other in enumerate(rest) if other in turn.reversed)
        slices.append(np.flip(plane, backwards))
    return Planes(*slices)


def draw_planes(
    planes: Planes,
    spacing: Sequence[float] | None = None,
    classes: Planes | None = None,
    heat: Planes | None = None,
    *,
    side: int = SIDE,
) -> Picture:
    """Draw slices side by side as RGB (rows, columns, 3) at one scale in millimetres.

    All slices share one intensity window, from the darkest to the brightest voxels. Non-finite
    voxels are black. Class 0 and unlabelled voxels stay grey.

    Args:
        planes: slices of the voxels.
        spacing: spacing along (depth, height, width) in millimetres; None draws cubes.
        classes: classes, overlaid in colours.
        heat: values, overlaid as a heat map with one scale, see `heated`.
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
    """Convert voxels to uint8 with one intensity window for all planes."""
    values = [plane.astype(np.float64) for plane in planes]
    flat = np.concatenate([plane.ravel() for plane in values])
    known = flat[np.isfinite(flat)]
    if not known.size:
        return [np.zeros(plane.shape, np.uint8) for plane in values]
    low, high = np.percentile(known, (_DARKEST, _BRIGHTEST))
    if low == high:  # nearly all voxels are equal
        low, high = known.min(), known.max()
    width = high - low if high > low else 1.0
    pictures = []
    for plane in values:
        shares = np.where(np.isfinite(plane), (plane - low) / width, 0.0)
        pictures.append(np.asarray((255 * shares.clip(0, 1)).round(), np.uint8))
    return pictures


def _nearest(classes: Array, rows: int, cols: int) -> Array:
    at = [
        (2 * np.arange(many) + 1) * few // (2 * many)
        for many, few in zip((rows, cols), classes.shape, strict=True)
    ]
    shown: Array = classes[at[0][:, None], at[1][None, :]]
    return shown


def _side_by_side(pictures: Sequence[Picture]) -> Picture:
    """Place pictures side by side on black, with gaps."""
    rows = max(len(one) for one in pictures)
    cols = sum(one.shape[1] for one in pictures) + _GAP * (len(pictures) - 1)
    canvas, col = np.zeros((rows, cols, 3), np.uint8), 0
    for one in pictures:
        canvas[: len(one), col : col + one.shape[1]] = one
        col += one.shape[1] + _GAP
    return canvas
