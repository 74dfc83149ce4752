"""Drawn slides whose class is visible in two of their tiles: rings, or crosses.

All tiles show filled discs of several sizes on a cloudy background. Two random tiles of a slide
also show a ring or a cross in the colour of the discs, both of the same kind, which is the class
of the slide. A single tile has no label and the mean colours of a slide carry no information, so an
encoder must learn the shapes from slide labels.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.data.image_source import Pixels

KINDS = ("cross", "ring")
"""Names of the classes."""

MARKED = 2
"""Tiles per slide that show its class."""

_GROUND, _INK = (225.0, 180.0, 205.0), (95.0, 60.0, 140.0)
_LEAST = 24  # minimum tile side in pixels, into which a mark fits


class RareTilesBag:
    """A drawn slide; see `data.bags.Bag`.

    Args:
        slide: name of the slide.
        kind: class index.
        tiles: number of tiles.
        side: side of a tile, in pixels.
        seed: other seeds give other slides.

    Raises:
        ValueError: a number is out of range.
    """

    path = Path("drawn")
    dtype: np.dtype[Any] = np.dtype(np.uint8)

    def __init__(self, slide: str, kind: int, tiles: int, side: int, seed: tuple[int, ...]) -> None:
        if tiles < MARKED or side < _LEAST or kind not in range(len(KINDS)):
            raise ValueError(
                f"a drawn slide has at least {MARKED} tiles of at least {_LEAST} pixels, and one "
                f"of {len(KINDS)} kinds, got data.tiles_a_slide={tiles}, data.tile_size={side}, "
                f"kind {kind}"
            )
        self.slide, self.kind, self.tiles, self.tile = slide, kind, tiles, (3, side, side)
        self._seed = seed

    @property
    def width(self) -> int:
        """Values per tile."""
        return 3 * self.tile[1] ** 2

    @cached_property
    def marked(self) -> npt.NDArray[np.int64]:
        """Indices of the tiles that show the class."""
        rng = np.random.default_rng([*self._seed, self.tiles])
        return np.sort(rng.choice(self.tiles, MARKED, replace=False))

    def read(self, start: int = 0, stop: int | None = None) -> Pixels:
        """Tiles [start, stop), uint8 (tiles, width)."""
        return self._pixels[start:stop]

    @cached_property
    def _pixels(self) -> Pixels:
        """Pixels of all tiles; cached, because every epoch reads them."""
        drawn = [
            draw_tile(
                np.random.default_rng([*self._seed, number]),
                self.tile[1],
                KINDS[self.kind] if number in self.marked else None,
            )
            for number in range(self.tiles)
        ]
        return np.stack(drawn).transpose(0, 3, 1, 2).reshape(self.tiles, self.width)


def draw_tile(rng: np.random.Generator, side: int, kind: str | None) -> Pixels:
    """Draw a tile (side, side, 3), with a mark unless `kind` is None."""
    from scipy.ndimage import gaussian_filter

    image = np.array(_GROUND) + rng.normal(0, 6, 3)
    clouds = gaussian_filter(rng.normal(size=(side, side)), 2)
    image = image + 10 * (clouds / clouds.std())[..., None]
    for _ in range(rng.integers(2, 5)):
        _place(image, rng, rng.uniform(2, 4.2), None)
    if kind is not None:
        _place(image, rng, rng.uniform(6, 8), kind)
    image += rng.normal(0, 5, image.shape)
    return np.asarray(image.clip(0, 255), np.uint8)


def _place(
    image: npt.NDArray[np.float64], rng: np.random.Generator, radius: float, kind: str | None
) -> None:
    """Draw a mark, or a disc, at a random place, rotated at random."""
    side = len(image)
    middle = rng.uniform(radius + 1, side - radius - 2, 2)
    angle = rng.uniform(0, np.pi)
    rows, columns = np.mgrid[:side, :side] - middle[:, None, None]
    distance = np.hypot(rows, columns)
    inside = distance < radius
    if kind == "ring":
        inside &= distance > radius - 2.2
    elif kind == "cross":
        along = columns * np.cos(angle) + rows * np.sin(angle)
        across = rows * np.cos(angle) - columns * np.sin(angle)
        arms = np.minimum(np.abs(along), np.abs(across)) < 1.3
        inside = (distance < 1.1 * radius) & arms
    image[inside] = np.array(_INK) + rng.normal(0, 10, 3)
