"""Synthetic slides: pyramidal TIFFs that look like stained tissue, with a class to learn.

All kinds are glands: a pale lumen, lined by epithelium with dark nuclei, in a fibrous stroma. In a
"ring" the lumens are discs, in a "strand" long winding channels; lumens of "facing" and "averted"
slides are pairs of crescents. Everything near a lumen is drawn by the same rules from the distance
to its edge, so colours, densities and small windows (64 pixels) are alike; only a window with a
whole gland (512 pixels) distinguishes rings from strands, one with a pair the other two.

The slide is drawn block by block. The content of a block depends on the seed and its position
alone, so there are no seams and a slide of any size needs little memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage

from spatialdl.slides.pyramid import write_pyramid

KINDS = ("ring", "strand")
ARRANGEMENTS = ("facing", "averted")
"""Kinds with the same glands in different arrangements; see `crescents`."""

Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Axis = npt.NDArray[np.float64]  # positions along rows or columns
Field = Callable[[Axis, Axis], Floats]

_BLOCK = (1024, 2048)  # rows, columns drawn at a time
_MARGIN = 112  # pixels around a block that can influence it
_COARSE = 4  # tissue and distances are computed at a quarter of the resolution
_PERIOD = 1024  # of the textures
_ZERO, _UNIT = 64, 1.5  # a distance in pixels is (byte - zero) / unit
_EPITHELIUM = 54.0  # thickness in pixels

# a lumen is the area closer than this to its core: a disc or crescent, the line of a strand
_AROUND_CORE = 37.0
_RING_SPACING, _RING_CORE = 396.0, 65.0
_STRAND_WAVELENGTH = 704.0

APART = 1024.0  # mean distance of the crescents of a pair in pixels
_JITTER = 160.0  # largest shift of a crescent, in each direction
_DOWN = 480.0  # mean distance of the pairs in pixels
_RADIUS, _BITE, _ASIDE = 105.0, 95.0, 62.0  # a disc, the disc cut out of it, and how far aside


def write_synthetic_slide(
    path: str | os.PathLike[str],
    kind: str,
    size: tuple[int, int] = (8192, 8192),
    mpp: float = 0.5,
    seed: int = 0,
    progress: Callable[[int], object] = lambda rows: None,
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
    drawing = _Drawing(kind, size, np.random.default_rng(seed))

    def bands() -> Iterator[Bytes]:
        for row in range(0, size[0], _BLOCK[0]):
            height = min(_BLOCK[0], size[0] - row)
            cols = range(0, size[1], _BLOCK[1])
            blocks = [
                drawing.block((row, col), (height, min(_BLOCK[1], size[1] - col))) for col in cols
            ]
            yield np.concatenate(blocks, 1)
            progress(height)

    write_pyramid(Path(path), bands(), size, mpp)


class _Drawing:
    """The random fields of one slide, which determine its pixels."""

    def __init__(self, kind: str, size: tuple[int, int], random: np.random.Generator) -> None:
        self._is_strand = kind == "strand"
        self._size = size
        self._colours = _colour_table(random)
        self._piece = max(min(size) * 0.55, 256.0)
        self._outlines = _waves(random, self._piece), _waves(random, 640.0), _waves(random, 130.0)
        self._cores = _cores(kind, size, random)
        self._fibres, self._grain, self._nuclei = _textures(int(random.integers(8)))
        axes = [np.linspace(0, length, 384) for length in size]
        coverage = random.uniform(0.58, 0.68)
        self._edge = float(np.quantile(self._outline(*axes), 1 - coverage))
        if kind in ARRANGEMENTS:
            self._edge = -self._piece  # tissue everywhere but at the border

    def block(self, start: tuple[int, int], shape: tuple[int, int]) -> Bytes:
        """Draw a block of `shape` from row and column `start`, uint8 (rows, columns, 3)."""
        rows, cols = (
            first + np.arange(_COARSE / 2 - _MARGIN, length + _MARGIN + _COARSE, _COARSE)
            for first, length in zip(start, shape, strict=True)
        )

        def fine(coarse: npt.NDArray[np.floating]) -> Bytes:
            image = Image.fromarray(_to_byte(coarse))
            image = image.resize(
                (image.width * _COARSE, image.height * _COARSE), Image.Resampling.BILINEAR
            )
            return np.asarray(image)[_MARGIN:, _MARGIN:][: shape[0], : shape[1]]

        tissue = fine(128 * np.clip(5 * (self._outline(rows, cols) - self._edge) + 0.5, 0, 1))
        distance = fine(_ZERO + _UNIT * self._distance(rows, cols))
        hematoxylin, eosin, dense = (table[distance] for table in _stain_tables())
        window = np.ix_(*(np.arange(k, k + n) % _PERIOD for k, n in zip(start, shape, strict=True)))
        hematoxylin = _product(hematoxylin, self._grain[window])
        np.maximum(hematoxylin, _product(self._nuclei[window], dense), out=hematoxylin)
        eosin = _product(_product(eosin, self._fibres[window]), tissue)
        index = _product(hematoxylin, tissue).astype(np.uint16) << 8 | eosin
        return np.asarray(self._colours[index])

    def _outline(self, rows: Axis, cols: Axis) -> Floats:
        """A field that is large inside of a piece of tissue, with a slope of 1 in 15 pixels."""
        depths = 0.0106 * self._piece, 4.0, 0.8
        fields = [depth * k(rows, cols) for depth, k in zip(depths, self._outlines, strict=True)]
        # glass all around
        down, across = (
            np.exp(-np.minimum(axis, length - axis) / (0.035 * length))
            for axis, length in zip((rows, cols), self._size, strict=True)
        )
        border = 0.04 * self._piece * (down[:, None] + across)
        return np.asarray(sum(fields) - border, np.float32)

    def _distance(self, rows: Axis, cols: Axis) -> Floats:
        """Distance in pixels to the edge of the nearest lumen, negative inside."""
        inside = self._cores(rows, cols)
        edge = np.zeros_like(inside)
        edge[1:] |= inside[1:] != inside[:-1]
        edge[:, 1:] |= inside[:, 1:] != inside[:, :-1]
        if not edge.any():
            return np.full(inside.shape, 100, np.float32)
        far = ndimage.distance_transform_edt(~edge).astype(np.float32) * _COARSE
        if not self._is_strand:  # whose core is the boundary; other cores are areas
            far[inside] *= -1
        smooth = ndimage.gaussian_filter(np.clip(far, -100, 120), 1.2, truncate=3)
        return np.asarray(smooth - _AROUND_CORE, np.float32)


def _waves(random: np.random.Generator, wavelength: float, spread: float = 0.4) -> Field:
    """A smooth random field: a sum of 16 plane waves in all directions, of variance 1."""
    # directions evenly around the circle, so that the field is isotropic
    direction = (np.arange(16) + random.uniform(0, 1, 16)) * np.pi / 8
    number = 2 * np.pi / (wavelength * (1 + spread * random.uniform(-1, 1, 16)))
    phase = random.uniform(0, 2 * np.pi, 16)

    def field(rows: Axis, cols: Axis) -> Floats:
        # a product of matrices, as cos(a + b) separates
        a = rows[:, None] * number * np.sin(direction) + phase
        b = cols[:, None] * number * np.cos(direction)
        left, right = np.hstack([np.cos(a), -np.sin(a)]), np.hstack([np.cos(b), np.sin(b)])
        return left.astype(np.float32) @ right.T.astype(np.float32) / np.float32(8**0.5)

    return field


def _cores(
    kind: str, size: tuple[int, int], random: np.random.Generator
) -> Callable[[Axis, Axis], Bools]:
    """The cores of the lumens as a mask of rows and columns; for strands, one side of them."""
    if kind in ARRANGEMENTS:
        places = crescents(size, kind == "facing", random)
        return lambda rows, cols: _discs(rows, cols, places, _RADIUS, bitten=True)
    if kind == "strand":
        winding = _waves(random, _STRAND_WAVELENGTH, 0.08)
        return lambda rows, cols: np.asarray(winding(rows, cols) > 0)
    # a jittered hexagonal lattice
    step = _RING_SPACING * 0.866
    i, j = np.mgrid[-1 : size[0] // step + 2, -1 : size[1] // _RING_SPACING + 2]
    jitter = random.uniform(-0.12, 0.12, (2, *i.shape))
    lattice = np.stack([(i + jitter[0]) * step, (j + i % 2 / 2 + jitter[1]) * _RING_SPACING], -1)
    return lambda rows, cols: _discs(rows, cols, lattice.reshape(-1, 2), _RING_CORE)


def crescents(size: tuple[int, int], facing: bool, random: np.random.Generator) -> Axis:
    """Place pairs of crescents: (crescents, 3), row, column, and 1 or -1, where they open to.

    Args:
        size: rows and columns of the slide.
        facing: whether the open sides of a pair face each other.
        random: determines the positions, not whether the crescents face each other.
    """
    count = max(1, round(size[0] / _DOWN))
    down = (np.arange(count) + 0.5) * size[0] / count
    place = np.stack(np.meshgrid(down, [-APART / 2, APART / 2], indexing="ij"), -1)
    place[..., 1] += size[1] / 2
    place += random.uniform(-_JITTER, _JITTER, place.shape)
    open_to = np.broadcast_to([1.0, -1.0] if facing else [-1.0, 1.0], place.shape[:2])
    return np.concatenate([place, open_to[..., None]], -1).reshape(-1, 3)


def _discs(rows: Axis, cols: Axis, places: Axis, radius: float, *, bitten: bool = False) -> Bools:
    """A mask of discs; from each a disc beside it may be cut out."""
    inside = np.zeros((len(rows), len(cols)), bool)
    for row, col, *open_to in places:
        near = [
            slice(*np.searchsorted(axis, (middle - radius, middle + radius)))
            for axis, middle in ((rows, row), (cols, col))
        ]
        dy, dx = rows[near[0], None] - row, cols[near[1]] - col
        disc = dy**2 + dx**2 < radius**2
        if bitten:
            disc &= dy**2 + (dx - open_to[0] * _ASIDE) ** 2 > _BITE**2
        inside[near[0], near[1]] |= disc
    return inside


@lru_cache(maxsize=1)
def _stain_tables() -> tuple[Bytes, Bytes, Bytes]:
    """Hematoxylin, eosin and density of nuclei by byte of distance: lumen, epithelium, stroma."""
    d = (np.arange(256) - _ZERO) / _UNIT
    lumen_edge, outer_edge = (
        np.clip(d / 2.5 + 0.5, 0, 1),
        np.clip((d - _EPITHELIUM) / 4 + 0.5, 0, 1),
    )
    brush = np.exp(-(((d - 3) / 3) ** 2))
    cleft = np.exp(-(((d - _EPITHELIUM - 3) / 4) ** 2))  # the lighter line around a gland
    hematoxylin = 3 + lumen_edge * (36 - 26 * outer_edge)
    eosin = 9 + lumen_edge * (62 + 40 * outer_edge) + 22 * brush - 38 * cleft
    nuclei = np.where((d > 10) & (d < _EPITHELIUM - 2), 128, np.where(d > _EPITHELIUM, 40, 0))
    return _to_byte(hematoxylin), _to_byte(eosin), _to_byte(nuclei)


def _colour_table(random: np.random.Generator) -> Bytes:
    """RGB for every pair of bytes of hematoxylin and eosin, by their absorption: (65536, 3)."""
    absorbs = np.array([[0.65, 0.72, 0.29], [0.14, 0.92, 0.38]]) + random.normal(0, 0.01, (2, 3))
    strength = np.array([1.75, 1.15]) * random.uniform(0.94, 1.06, 2)
    glass = np.array([244, 243, 245]) + random.normal(0, 1.0, 3)
    light = np.exp(-np.arange(256)[:, None, None] / 160 * absorbs * strength[:, None])
    return _to_byte(glass * light[:, None, 0] * light[None, :, 1]).reshape(-1, 3)


@lru_cache(maxsize=8)
def _textures(seed: int) -> tuple[Bytes, Bytes, Bytes]:
    """Periodic textures: fibres and grain around 128, dark nuclei on 0."""
    random = np.random.default_rng(seed)

    def smooth(values: Floats, reach: float | tuple[float, float]) -> Floats:
        field = ndimage.gaussian_filter(values, reach, mode="wrap")
        return np.asarray((field - field.mean()) / field.std(), np.float32)

    noise = random.normal(0, 1, (2, _PERIOD, _PERIOD)).astype(np.float32)
    fibres = smooth(noise[0], (1.6, 22)) + 0.5 * smooth(noise[1], 5)
    i, j = (16 * np.mgrid[: _PERIOD // 16, : _PERIOD // 16]).reshape(2, -1)
    points = np.zeros((_PERIOD, _PERIOD), np.float32)
    points[i + random.integers(0, 12, i.size), j + random.integers(0, 12, i.size)] = 1
    spots = smooth(points, (3.0, 3.4)) * (1 + 0.15 * smooth(noise[1], 1.1))
    nuclei = 150 * np.clip(1.2 * spots - 0.2, 0, 1)
    return (
        _to_byte(128 + 21 * fibres),
        _to_byte(128 + 26 * smooth(noise[1], 1.4)),
        _to_byte(nuclei),
    )


def _product(values: Bytes, factor: Bytes) -> Bytes:
    """`values * factor / 128`, clipped to 255."""
    product = np.multiply(values, factor, dtype=np.uint16) >> 7
    return np.asarray(np.minimum(product, 255), np.uint8)


def _to_byte(values: npt.NDArray[np.floating]) -> Bytes:
    return np.asarray(np.clip(np.rint(values), 0, 255), np.uint8)
