"""Synthetic slides: pyramidal TIFFs that look like stained tissue, with a class to learn.

Both kinds are glands: a pale lumen, lined by epithelium with dark nuclei, in a fibrous stroma.
In a "ring" the lumens are discs, in a "strand" long winding channels. Everything near a lumen is
drawn by the same rules from the distance to its edge, and the sizes are chosen so that lumen and
epithelium cover the same area. So colours, densities and small windows (64 pixels) are alike; only
a window with a whole gland (512 pixels) distinguishes the kinds.

The slide is drawn block by block. The content of a block depends on the seed and its position
alone (sums of plane waves, hashed lattice cells), so there are no seams and a slide of any size
needs little memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import pi
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage

from spatialdl.slides.pyramid import write_pyramid
from spatialdl.slides.synthetic.fields import Axis, Bytes, Floats, Waves, hashed
from spatialdl.slides.synthetic.staining import (
    DISTANCE_UNIT,
    DISTANCE_ZERO,
    EPITHELIUM,
    PERIOD,
    SHAPES,
    SPRITE,
    TURNS,
    colour_table,
    cut,
    multiply,
    nucleus_sprites,
    rgb,
    stain_tables,
    stamp,
    textures,
    to_byte,
)

KINDS = ("ring", "strand")
ARRANGEMENTS = ("facing", "averted")
"""Kinds with the same glands in different arrangements; see `Crescents`."""

_BLOCK = (1024, 2048)  # rows, columns drawn at a time
_MARGIN = 112  # pixels around a block that can influence it
_COARSE = 4  # tissue and distances are computed at a quarter of the resolution

# a lumen is the area closer than this to its core: a disc in a ring, a line in a strand
_AROUND_CORE = 37.0
_RING_SPACING, _RING_CORE = 396.0, 65.0
_STRAND_WAVELENGTH = 704.0
_NUCLEUS_SPACING = 16
_BEND = 80.0  # how far fibres are shifted, in pixels


def write_synthetic_slide(
    path: str | os.PathLike[str],
    kind: str,
    size: tuple[int, int] = (8192, 8192),
    mpp: float = 0.5,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write a synthetic slide in a format that openslide supports.

    Args:
        path: the TIFF to write; an existing one is replaced atomically.
        kind: one of `KINDS` or `ARRANGEMENTS`.
        size: rows and columns at level 0.
        mpp: micrometres per pixel in the metadata; the drawing is the same in pixels.
        seed: determines the drawing and the stain.
        progress: called with the number of rows drawn since the last call.

    Raises:
        ValueError: an unknown kind, or a size or mpp that is not positive.
    """
    if kind not in KINDS + ARRANGEMENTS:
        known = ", ".join(KINDS + ARRANGEMENTS)
        raise ValueError(f"kind is {kind!r}, expected one of {known}")
    if min(size) < 1 or mpp <= 0:
        raise ValueError(f"size {size} and mpp {mpp} must be positive")
    picture = _Picture(kind, size, seed)
    write_pyramid(Path(path), _with_progress(picture.bands(), progress), size, mpp)


def _with_progress(
    bands: Iterator[Bytes], progress: Callable[[int], object] | None
) -> Iterator[Bytes]:
    for band in bands:
        yield band
        if progress is not None:
            progress(len(band))


class _Block(NamedTuple):
    """A rectangle of the slide, in level-0 pixels."""

    row0: int
    col0: int
    height: int
    width: int

    def axes(self) -> tuple[Axis, Axis]:
        """Return the centres of the coarse pixels of the block and its margin."""
        first = -_MARGIN + _COARSE / 2
        rows = np.arange(first, self.height + _MARGIN + _COARSE, _COARSE, dtype=np.float64)
        cols = np.arange(first, self.width + _MARGIN + _COARSE, _COARSE, dtype=np.float64)
        return rows + self.row0, cols + self.col0

    def fine(self, coarse: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """Resample coarse pixels (with margin) to the pixels of the block, bilinear."""
        height, width = coarse.shape
        image = Image.fromarray(coarse).resize(
            (width * _COARSE, height * _COARSE), Image.Resampling.BILINEAR
        )
        rows, cols = slice(_MARGIN, _MARGIN + self.height), slice(_MARGIN, _MARGIN + self.width)
        return np.asarray(image)[rows, cols]


@dataclass
class _Coarse:
    """Fields of a block at a quarter of the resolution."""

    tissue: Floats  # positive inside a piece of tissue, 1 about 15 pixels from its edge
    distance: Floats  # to the edge of the nearest lumen, in pixels, negative inside
    bend: Floats  # shift of the fibres
    inflamed: Floats  # density of lymphocytes


class _Picture:
    """The random fields of one slide, which determine its pixels."""

    def __init__(self, kind: str, size: tuple[int, int], seed: int) -> None:
        self._kind = kind
        self._size = size
        random = np.random.default_rng(seed)
        self._key = int(random.integers(1 << 62))
        self._colours = colour_table(random)
        self._piece = max(min(size) * 0.55, 256.0)
        self._outline = Waves(random, self._piece, 0.5, 12)
        self._fringes = Waves(random, 640.0, 0.6, 12), Waves(random, 130.0, 0.5, 16)
        self._winding = Waves(random, _STRAND_WAVELENGTH, 0.08, 32)
        self._warp = Waves(random, 300.0, 0.3, 12), Waves(random, 300.0, 0.3, 12)
        self._bend = Waves(random, 760.0, 0.4, 12)
        self._inflamed = Waves(random, 900.0, 0.4, 12)
        self._thickness = Waves(random, 1500.0, 0.5, 12)
        self._fibres, self._grain = textures(int(random.integers(1 << 31)))
        self._edge = self._outline_at_coverage(float(random.uniform(0.58, 0.68)))
        if kind in ARRANGEMENTS:
            self._edge = -self._piece  # tissue everywhere but at the border
            self._crescents = Crescents(random, size, facing=kind == "facing")

    def bands(self) -> Iterator[Bytes]:
        """Yield bands of rows from top to bottom, (rows, columns, 3)."""
        rows, cols = self._size
        for row in range(0, rows, _BLOCK[0]):
            height = min(_BLOCK[0], rows - row)
            band = np.empty((height, cols, 3), np.uint8)
            for col in range(0, cols, _BLOCK[1]):
                width = min(_BLOCK[1], cols - col)
                band[:, col : col + width] = self._drawn(_Block(row, col, height, width))
            yield band

    def _drawn(self, block: _Block) -> Bytes:
        """The pixels of a block."""
        rows, cols = block.axes()
        tissue = self._outline_field(rows, cols) - np.float32(self._edge)
        if tissue.max() < -1:
            return np.broadcast_to(rgb(self._colours[:1]), (block.height, block.width, 3))
        coarse = _Coarse(
            tissue,
            self._distance(rows, cols),
            _BEND * self._bend(rows, cols),
            np.clip(self._inflamed(rows, cols) - np.float32(0.9), 0, 1),
        )
        # the thickness of the section varies, and the strength of stains with it
        thickness = np.clip(5 * tissue + 0.5, 0, 1) * (1 + 0.1 * self._thickness(rows, cols))
        present = np.asarray(block.fine(to_byte(128 * thickness)), np.uint8)
        distance = block.fine(to_byte(DISTANCE_ZERO + DISTANCE_UNIT * coarse.distance))
        hematoxylin, eosin = (table[distance] for table in stain_tables())
        multiply(eosin, self._bent_fibres(block, block.fine(coarse.bend)))
        multiply(eosin, present)
        multiply(hematoxylin, cut(self._grain, *block))
        multiply(hematoxylin, present)
        _draw_nuclei(hematoxylin, block, coarse, self._key)
        index = hematoxylin.astype(np.uint16)
        index <<= 8
        index |= eosin
        return rgb(self._colours[index])

    def _bent_fibres(self, block: _Block, bend: npt.NDArray[np.generic]) -> Bytes:
        """The fibre texture, its rows shifted by `bend`."""
        row0, col0, height, width = block
        index = bend.astype(np.int32)
        index += np.arange(row0, row0 + height, dtype=np.int32)[:, None]
        index &= PERIOD - 1
        index *= PERIOD
        index += (np.arange(col0, col0 + width, dtype=np.int32) & (PERIOD - 1))[None, :]
        return self._fibres.ravel()[index]

    def _outline_field(self, rows: Axis, cols: Axis) -> Floats:
        # scaled so that the slope at the edge of a piece is the same on slides of any size
        height, width = self._size
        field = np.float32(0.0106 * self._piece) * self._outline(rows, cols)
        for fringe, depth in zip(self._fringes, (4.0, 0.8), strict=True):
            field += np.float32(depth) * fringe(rows, cols)
        # glass all around
        down = np.minimum(rows, height - rows) / (0.035 * height)
        across = np.minimum(cols, width - cols) / (0.035 * width)
        border = np.exp(-down)[:, None] + np.exp(-across)[None, :]
        return np.asarray(field - 0.04 * self._piece * border, np.float32)

    def _outline_at_coverage(self, coverage: float) -> float:
        """The level above which the outline covers the given fraction of the slide."""
        rows, cols = (np.linspace(0, n, 384) for n in self._size)
        return float(np.quantile(self._outline_field(rows, cols), 1 - coverage))

    def _distance(self, rows: Axis, cols: Axis) -> Floats:
        """Distance in pixels to the edge of the nearest lumen, negative inside."""
        inside = self._inside(rows, cols)
        edge = np.zeros_like(inside)
        edge[1:] |= inside[1:] != inside[:-1]
        edge[:, 1:] |= inside[:, 1:] != inside[:, :-1]
        if not edge.any():
            return np.full(inside.shape, 100, np.float32)
        far = ndimage.distance_transform_edt(~edge).astype(np.float32) * _COARSE
        if self._kind != "strand":  # whose core is the boundary; other cores are areas
            far[inside] *= -1
        np.clip(far, -100, 120, out=far)
        smooth = ndimage.gaussian_filter(far, 1.2, truncate=3)
        return np.asarray(smooth - np.float32(_AROUND_CORE))

    def _inside(self, rows: Axis, cols: Axis) -> npt.NDArray[np.bool_]:
        """Mask of the cores of the lumens; for strands, of one side of them."""
        if self._kind == "ring":
            return self._ring_cores(rows, cols)
        if self._kind == "strand":
            return self._sides(rows, cols)
        return self._crescents(rows, cols)

    def _sides(self, rows: Axis, cols: Axis) -> npt.NDArray[np.bool_]:
        """Mask of one side of the strands."""
        return np.asarray(self._winding(rows, cols) + 0.12 * self._warp[0](rows, cols) > 0)

    def _ring_cores(self, rows: Axis, cols: Axis) -> npt.NDArray[np.bool_]:
        """Mask of the cores of rings: slightly deformed discs on a jittered hexagonal lattice."""
        warp_rows, warp_cols = (14 * waves(rows, cols) for waves in self._warp)
        cores = np.zeros((len(rows), len(cols)), bool)
        step = _RING_SPACING * 0.866
        i, j = _lattice(
            (int(rows[0] // step) - 1, int(rows[-1] // step) + 3),
            (int(cols[0] // _RING_SPACING) - 2, int(cols[-1] // _RING_SPACING) + 3),
        )
        u = hashed(self._key, i, j, 3)
        down = (i + 0.24 * (u[:, 0] - 0.5)) * step
        across = (j + 0.5 * (i % 2) + 0.24 * (u[:, 1] - 0.5)) * _RING_SPACING
        radius = _RING_CORE * (0.75 + 0.5 * u[:, 2])
        for row, col, r in zip(down.tolist(), across.tolist(), radius.tolist(), strict=True):
            near = _window(rows, row, 3 * r), _window(cols, col, 3 * r)
            dy = rows[near[0], None] + warp_rows[near] - row
            dx = cols[None, near[1]] + warp_cols[near] - col
            cores[near] |= dy**2 + dx**2 < r**2
        return cores


def _draw_nuclei(hematoxylin: Bytes, block: _Block, coarse: _Coarse, key: int) -> None:
    """Draw the nuclei of a block, at most one per cell of a lattice."""
    step, reach = _NUCLEUS_SPACING, SPRITE // 2
    i, j = _lattice(
        ((block.row0 - reach) // step - 1, (block.row0 + block.height + reach) // step + 2),
        ((block.col0 - reach) // step - 1, (block.col0 + block.width + reach) // step + 2),
    )
    u = hashed(key ^ 0x5EED, i, j, 6)
    rows = ((i + 0.15 + 0.7 * u[:, 0]) * step).astype(np.int64) - block.row0
    cols = ((j + 0.15 + 0.7 * u[:, 1]) * step).astype(np.int64) - block.col0
    place = (rows + _MARGIN) // _COARSE, (cols + _MARGIN) // _COARSE
    near, inflamed = coarse.distance[place], coarse.inflamed[place]
    in_epithelium = (near > 14) & (near < EPITHELIUM - 6)
    in_stroma = np.where(near > EPITHELIUM, 0.13 + 0.6 * inflamed, 0.0)
    chance = np.where(in_epithelium, 0.86, in_stroma)
    kept = (u[:, 2] < chance) & (coarse.tissue[place] > 1.0)
    # families of sprites: 0 epithelium, 1 spindles of stroma, 2 lymphocytes
    family = np.where(in_epithelium, 0, np.where(u[:, 5] < 0.15 + inflamed, 2, 1))
    form = (u[:, 4] * SHAPES).astype(np.int64) + SHAPES * family
    angle = _directions(coarse, place, in_epithelium) + 0.5 * (u[:, 3] - 0.5)
    turn = np.round(angle / pi * TURNS).astype(np.int64) % TURNS
    sprites = nucleus_sprites()
    for row, col, a, b in np.stack([rows - reach, cols - reach, form, turn], 1)[kept].tolist():
        stamp(hematoxylin, sprites[a][b], row, col)


def _directions(
    coarse: _Coarse,
    place: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    in_epithelium: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float64]:
    """Angles of nuclei: normal to the edge of the lumen, or along the fibres of the stroma."""
    slope_rows, slope_cols = (np.asarray(np.gradient(coarse.distance, axis=k)) for k in (0, 1))
    upright = np.arctan2(slope_rows[place], slope_cols[place])
    along = np.arctan(-np.asarray(np.gradient(coarse.bend, axis=1))[place] / _COARSE)
    return np.asarray(np.where(in_epithelium, upright, along), np.float64)


def _lattice(
    rows: tuple[int, int], cols: tuple[int, int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Flat arrays of the row and column of every cell of a lattice."""
    i, j = np.meshgrid(np.arange(*rows), np.arange(*cols), indexing="ij")
    return i.ravel(), j.ravel()


def _window(axis: Axis, centre: float, reach: float) -> slice:
    first, last = np.searchsorted(axis, (centre - reach, centre + reach))
    return slice(int(first), int(last))


APART = 1024.0  # mean distance of the columns in pixels
_JITTER = 160.0  # largest shift of a crescent, in each direction
_DOWN = 480.0  # mean distance of the rows in pixels
_RADIUS, _BITE = 105.0, 95.0  # radii of the disc, and of the disc cut out of it
_ASIDE = 62.0  # distance of the centres of these two in pixels


class Crescents:
    """Crescent-shaped cores of lumens, in pairs.

    Args:
        random: determines the positions, not whether the crescents face each other.
        size: rows and columns of the slide.
        facing: whether the open sides of a pair face each other.
    """

    def __init__(self, random: np.random.Generator, size: tuple[int, int], facing: bool) -> None:
        rows, cols = size
        count = max(1, round(rows / _DOWN))
        down = (np.arange(count) + 0.5) * rows / count
        place = np.stack(np.meshgrid(down, [-APART / 2, APART / 2], indexing="ij"), -1)
        place[..., 1] += cols / 2
        place += random.uniform(-_JITTER, _JITTER, place.shape)
        open_to = np.broadcast_to([1.0, -1.0] if facing else [-1.0, 1.0], place.shape[:2])
        self._all = np.concatenate([place, open_to[..., None]], -1).reshape(-1, 3)

    def __call__(self, rows: Axis, cols: Axis) -> npt.NDArray[np.bool_]:
        """Return whether each (row, column) is in a core."""
        inside = np.zeros((len(rows), len(cols)), bool)
        for row, col, open_to in self._all.tolist():
            dy, dx = rows[:, None] - row, cols[None, :] - col
            disc = dy**2 + dx**2 < _RADIUS**2
            inside |= disc & (dy**2 + (dx - open_to * _ASIDE) ** 2 > _BITE**2)
        return inside
