"""Synthetic volumes of fractals, with a class for every voxel, generated box by box.

Every octant of a volume contains the attractor of an iterated function system, or a solid ball,
each rotated, placed and lit at random, later ones on top. Air and balls are class 0; the voxels of
a fractal have the class of its system. A single voxel does not reveal its class: brightness differs
between objects, noise covers everything, and only the shape around a voxel determines it.

A voxel is computed by following it backwards through the maps of its system until it leaves the
hull of the attractor, or the copies are as small as voxels. It depends on no other voxel, so a rank
computes only its box. Larger volumes show finer copies of the same shapes.
"""

from __future__ import annotations

from itertools import product
from math import floor, log, pi, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.data.image_source import extents, pairs
from spatialdl.data.synthetic import Pixels, SyntheticDataset, mix, noise

Floats = npt.NDArray[np.float64]

_RADII = 1 / 4, 5 / 16  # of objects, relative to the shortest side of the volume
_THINNEST = 1.0  # voxels from the centre of the smallest copies to their faces
_AIR, _DARKEST, _BRIGHTEST = 64.0, 120.0, 216.0
_DRAWS = 9  # random numbers per object


class System(NamedTuple):
    """Maps x -> ratio * x + shift of the unit ball into itself.

    Attributes:
        shifts: (maps, 3). Each image of the hull lies where its shift is the nearest one.
        faces: (faces, 3), outward normals of the hull: x is inside if no product is above 1.
    """

    name: str
    ratio: float
    shifts: Floats
    faces: Floats


class _Object(NamedTuple):
    """Position in voxels, rows of axes, brightness, and class (0 for a ball) of an object."""

    centre: tuple[float, ...]
    radius: float
    axes: Floats
    brightness: float
    label: int


def _systems() -> tuple[System, ...]:
    tetrahedron = np.array([(1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)]) / sqrt(3)
    octahedron = np.concatenate([np.eye(3), -np.eye(3)])
    cells = np.array(list(product((-1, 0, 1), repeat=3)))
    away = np.abs(cells).sum(1)
    corners = cells[away == 3].astype(np.float64)
    thirds, cube = 2 / sqrt(27), sqrt(3) * octahedron
    return (
        System("Sierpinski tetrahedron", 1 / 2, tetrahedron / 2, -3 * tetrahedron),
        System("Menger sponge", 1 / 3, thirds * cells[away >= 2], cube),
        System("Sierpinski octahedron", 1 / 2, octahedron / 2, corners),
        System("Cantor dust", 2 / 5, 3 / 5 / sqrt(3) * corners, cube),
        System("Vicsek cross", 1 / 3, thirds * cells[away <= 1], cube),
    )


SYSTEMS = _systems()
"""Systems of the classes from 1 on."""


class SyntheticFractals(SyntheticDataset):
    """Deterministic volumes with masks; arguments as for `SyntheticDataset`.

    Raises:
        ValueError: not 3 spatial dims, or more classes than background and `SYSTEMS`.
    """

    has_masks = True

    def __init__(
        self,
        samples: int,
        image_size: tuple[int, ...],
        num_classes: int = 6,
        channels: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(samples, image_size, num_classes, channels, seed)
        if len(image_size) != 3:
            raise ValueError(
                f"synthetic fractals are volumes: data.image_size={list(image_size)} must be "
                "[slices,rows,columns]"
            )
        if not 2 <= num_classes <= len(SYSTEMS) + 1:
            raise ValueError(
                f"data.num_classes={num_classes} of fractals must be 2 to {len(SYSTEMS) + 1}: the "
                f"background, {', '.join(system.name for system in SYSTEMS)}"
            )
        self.classes = ["background", *(system.name for system in SYSTEMS[: num_classes - 1])]

    def read(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """A box (slice0, slice1, row0, ...) of a sample: uint8 (slices, rows, cols, channels)."""
        own = self._box(box)
        light = np.full(extents(own), _AIR)
        for one in self._objects(sample):
            window, inside = _drawn(own, one)
            light[window][inside] = one.brightness
        grain = noise(self._key(sample), own, self.channels) // 2
        return np.asarray(np.clip(light[..., None] + grain, 0, 255), dtype=np.uint8)

    def read_mask(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """The class of every voxel of a box: uint8 (slices, rows, cols)."""
        own = self._box(box)
        mask = np.zeros(extents(own), np.uint8)
        for one in self._objects(sample):
            window, inside = _drawn(own, one)
            mask[window][inside] = one.label
        return mask

    def _objects(self, sample: int) -> list[_Object]:
        counters = np.arange(8 * _DRAWS, dtype=np.uint64)
        draws = mix(self._key(sample) + (np.uint64(1) << np.uint64(43)) + counters) / 2.0**64
        shorter, found = min(self._size), []
        for octant, row in zip(product((0, 1), repeat=3), draws.reshape(8, _DRAWS), strict=True):
            halves = (half + (1 + share) / 3 for half, share in zip(octant, row, strict=False))
            centre = tuple(many * n / 2 for many, n in zip(halves, self._size, strict=True))
            radius = shorter * (_RADII[0] + (_RADII[1] - _RADII[0]) * row[3])
            brightness = _DARKEST + (_BRIGHTEST - _DARKEST) * row[4]
            label = int(row[5] * len(self.classes))
            axes = _rotation(row[6:])
            found.append(_Object(centre, radius if label else radius / 2, axes, brightness, label))
        return found


def _rotation(draws: Floats) -> Floats:
    """A uniformly distributed rotation (Shoemake, Graphics Gems III, 1992)."""
    first, second = sqrt(1 - draws[0]), sqrt(draws[0])
    x, y = first * np.sin(2 * pi * draws[1]), first * np.cos(2 * pi * draws[1])
    z, w = second * np.sin(2 * pi * draws[2]), second * np.cos(2 * pi * draws[2])
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def _drawn(box: tuple[int, ...], one: _Object) -> tuple[tuple[slice, ...], npt.NDArray[np.bool_]]:
    """The window of a box that an object may overlap, and a mask of the voxels that it fills."""
    window, places = [], []
    for (first, end), middle in zip(pairs(box), one.centre, strict=True):
        start = min(max(first, floor(middle - one.radius)), end)
        stop = max(start, min(end, floor(middle + one.radius) + 2))
        window.append(slice(start - first, stop - first))
        places.append((np.arange(start, stop) - middle) / one.radius)
    z, y, x = np.ix_(*places)
    inside = np.asarray(z * z + y * y + x * x <= 1)
    if one.label:
        z, y, x = (np.broadcast_to(values, inside.shape)[inside] for values in (z, y, x))
        turned = [row[0] * z + row[1] * y + row[2] * x for row in one.axes]
        inside[inside] = filled_places(SYSTEMS[one.label - 1], turned, one.radius)
    return tuple(window), inside


def filled_places(system: System, places: list[Floats], radius: float) -> npt.NDArray[np.bool_]:
    """Mask of the places (three coordinates in the unit ball) that the copies of a hull fill.

    Products are written out: a matrix product would round depending on the number of places, and a
    voxel would depend on the box in which it is read.
    """
    thickness = radius / sqrt(float(system.faces[0] @ system.faces[0]))
    depth = max(1, floor(log(thickness / _THINNEST) / log(1 / system.ratio)))
    filled = np.zeros(len(places[0]), bool)
    left = np.arange(len(filled))
    for level in range(depth + 1):
        if level:
            nearest = np.zeros(len(left), np.int64)
            most = np.full(len(left), -np.inf)
            for number, shift in enumerate(system.shifts):
                near = _product(shift, places) - shift @ shift / 2
                closer = near > most
                nearest[closer], most[closer] = number, near[closer]
            places = [
                (values - system.shifts[nearest, dim]) / system.ratio
                for dim, values in enumerate(places)
            ]
        kept = np.ones(len(left), bool)
        for face in system.faces:
            kept &= _product(face, places) <= 1
        left, places = left[kept], [values[kept] for values in places]
    filled[left] = True
    return filled


def _product(vector: Floats, places: list[Floats]) -> Floats:
    return np.asarray(vector[0] * places[0] + vector[1] * places[1] + vector[2] * places[2])
