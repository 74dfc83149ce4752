"""Pictures of volumes: three orthogonal planes through the middle, classes or heat over them.

Ranks that split a volume cut their parts of the planes, and rank 0 joins and draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from spatialdl.data.format import UNLABELLED
from spatialdl.data.image_source import Box, pairs
from spatialdl.data.volume_geometry import Geometry, VolumeTurn
from spatialdl.inference.predicting.pictures import HEAT_COLOURS, HEAT_OPACITY, faint

Array = npt.NDArray[Any]
Picture = npt.NDArray[np.uint8]

SIDE = 320
"""Pixels of the longest edge of a volume."""

COLOURS = np.array(
    [
        *((230, 60, 40), (40, 110, 220), (250, 190, 0), (20, 160, 90), (160, 60, 190)),
        *((0, 180, 200), (240, 110, 170), (120, 80, 40), (150, 200, 40), (90, 90, 160)),
    ],
    np.float64,
)
"""Colours of the classes from 1 on; class 0 has none."""

_OPACITY = 0.45
_DRAWN = Geometry("IPL")  # head up, anterior up or left, right side left
_GAP = 4  # pixels between two planes
_DARKEST, _BRIGHTEST = 0.5, 99.5  # percentiles of black and white


class PlanePart(NamedTuple):
    """Part of a plane, with the position of its first pixel."""

    row: int
    col: int
    values: Array


def cut_planes(
    read: Callable[[Box], Array], box: Box, size: Sequence[int]
) -> list[PlanePart | None]:
    """Cut a box's parts of the three planes through the middle of a volume.

    Args:
        read: returns the voxels (*spatial) of a box within `box`.
        box: box of the voxels in the volume.
        size: (depth, height, width) of the volume.

    Returns:
        The axial, coronal and sagittal part; None for planes outside the box.
    """
    parts: list[PlanePart | None] = []
    for dim, n in enumerate(size):
        bounds = list(pairs(box))
        first, end = bounds[dim]
        bounds[dim] = (n // 2, n // 2 + 1)
        row, col = (start for other, (start, _) in enumerate(bounds) if other != dim)
        inside = first <= n // 2 < end
        flat = tuple(number for span in bounds for number in span)
        parts.append(PlanePart(row, col, read(flat).squeeze(dim)) if inside else None)
    return parts


def window_in(inside: Box, box: Box) -> tuple[slice, ...]:
    """Slices of a box in the values of an enclosing box."""
    starts = [first for first, _ in pairs(box)]
    spans = zip(pairs(inside), starts, strict=True)
    return tuple(slice(first - start, end - start) for (first, end), start in spans)


def join_planes(parts: Sequence[Sequence[PlanePart | None]], size: Sequence[int]) -> list[Array]:
    """Join the parts of all boxes to whole planes; they are 0 where no part is."""
    planes = []
    for dim, of_plane in enumerate(zip(*parts, strict=True)):
        known = [part for part in of_plane if part is not None]
        shape = [n for other, n in enumerate(size) if other != dim]
        whole = np.zeros(shape, known[0].values.dtype if known else np.uint8)
        for row, col, values in known:
            whole[row : row + len(values), col : col + values.shape[1]] = values
        planes.append(whole)
    return planes


def draw_planes(
    planes: Sequence[Array],
    spacing: Sequence[float] | None = None,
    affine: npt.ArrayLike | None = None,
    classes: Sequence[Array] | None = None,
    heat: Sequence[Array] | None = None,
    *,
    side: int = SIDE,
) -> Picture:
    """Draw planes side by side as RGB (rows, columns, 3) at one scale in millimetres.

    With a known affine, the patient's head and front are up and the right side is left. All planes
    share one intensity window, from the darkest to the brightest voxels. Non-finite voxels are
    black. Class 0 and unlabelled voxels stay grey.

    Args:
        planes: voxels of the axial, coronal and sagittal plane.
        spacing: spacing of the voxels in millimetres; None draws cubes.
        affine: (3, 4), from (slice, row, column) to millimetres in RAS+.
        classes: classes in the planes, overlaid in colours.
        heat: values in the planes, overlaid as a heat map with one scale, see `heated`.
        side: pixels of the longest edge of the volume.
    """
    turn = _DRAWN.turn(affine)
    depth, height, width = turn.seen_size(tuple(spacing or (1.0, 1.0, 1.0)))
    edges = ((height, width), (depth, width), (depth, height))
    shown = _turned(_grey(planes), turn)
    extents = [
        tuple(n * edge for n, edge in zip(plane.shape, voxel, strict=True))
        for plane, voxel in zip(shown, edges, strict=True)
    ]
    zoom = side / max(length for extent in extents for length in extent)
    drawn = []
    for number, (plane, extent) in enumerate(zip(shown, extents, strict=True)):
        rows, cols = (max(1, round(length * zoom)) for length in extent)
        image = Image.fromarray(plane).resize((cols, rows), Image.Resampling.BOX)
        picture = np.repeat(np.asarray(image)[..., None], 3, axis=2)
        if classes is not None:
            picture = _overlaid(picture, _turned(classes, turn)[number])
        if heat is not None:
            most = max(plane.max() for plane in heat)
            picture = heated(picture, _turned(heat, turn)[number], most)
        drawn.append(picture)
    return _side_by_side(drawn)


def _turned(planes: Sequence[Array], turn: VolumeTurn) -> list[Array]:
    """Reorient the planes of a volume."""
    turned = []
    for dim, stored in enumerate(turn.dims):
        rest = [other for other in range(3) if other != dim]
        plane = planes[stored]
        if turn.dims[rest[0]] > turn.dims[rest[1]]:
            plane = plane.T
        backwards = tuple(k for k, other in enumerate(rest) if other in turn.reversed)
        turned.append(np.flip(plane, backwards))
    return turned


def _grey(planes: Sequence[Array]) -> list[Picture]:
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


def _overlaid(image: Picture, classes: Array) -> Picture:
    """Overlay an image with class colours."""
    classes = classes[_nearest(image, classes)]
    tint = COLOURS[(classes.astype(np.int64) - 1) % len(COLOURS)]
    shown = ((classes > 0) & (classes != UNLABELLED))[..., None]
    mixed = (1 - _OPACITY) * image + _OPACITY * tint
    return np.where(shown, mixed, image).round().astype(np.uint8)


def heated(image: Picture, values: Array, most: float | None = None) -> Picture:
    """Overlay an image (rows, columns, 3) with a heat map.

    Args:
        image: the picture.
        values: (rows, columns), of any number.
        most: value of the last colour, the first is 0; None uses the maximum.
    """
    from matplotlib import colormaps

    most = values.max() if most is None else most
    shares = (values / (most if most > 0 else 1.0)).clip(0, 1)
    colours = 255 * colormaps[HEAT_COLOURS](shares[_nearest(image, values)])[..., :3]
    mixed = (1 - HEAT_OPACITY) * faint(image)[..., None] + HEAT_OPACITY * colours
    return np.asarray(mixed.round(), np.uint8)


def _nearest(image: Array, values: Array) -> tuple[Array, Array]:
    """Index of the value nearest to each pixel of an image."""
    rows, cols = (
        (2 * np.arange(many) + 1) * few // (2 * many)
        for many, few in zip(image.shape[:2], values.shape, strict=True)
    )
    return rows[:, None], cols[None, :]


def _side_by_side(pictures: Sequence[Picture]) -> Picture:
    """Place pictures side by side on black, with gaps."""
    rows = max(len(one) for one in pictures)
    cols = sum(one.shape[1] for one in pictures) + _GAP * (len(pictures) - 1)
    canvas, col = np.zeros((rows, cols, 3), np.uint8), 0
    for one in pictures:
        canvas[: len(one), col : col + one.shape[1]] = one
        col += one.shape[1] + _GAP
    return canvas
