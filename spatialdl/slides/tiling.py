"""Which tiles of a slide are worth cutting: a grid at one resolution, kept where tissue is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.errors import SlideError
from spatialdl.slides.reader import Slide, Thumbnail
from spatialdl.slides.tissue import Tissue, find_tissue

_MASK_MPP = 8.0  # fine enough to see glands, coarse enough for one look
_PIXELS_PER_TILE = 16  # of the thumbnail, so that a part of a tile can be told
_LONGEST_THUMBNAIL = 4096
_FINEST = 0.9  # of the slide's own resolution: beyond it pixels would be invented
_SLACK = 0.01  # part of a tile that may lie beyond the edge (sizes are rounded)


@dataclass(frozen=True)
class TilePlan:
    """The tiles of one slide.

    Attributes:
        tile_size, min_tissue: what was asked for.
        scale: level-0 pixels per pixel of a tile.
        step: level-0 pixels that a tile spans, along one dim.
        grid: rows and columns of tiles that fit into the slide.
        places: level-0 (x, y) of the top-left corners of the tiles that are kept.
        doubtful: those of them that lie where the thumbnail could not be read; they are looked
            at when they are cut.
        thumbnail, tissue: what the choice was made on.
        reason: why no tile is kept; empty if some are.
    """

    tile_size: int
    min_tissue: float
    scale: float
    step: float
    grid: tuple[int, int]
    places: list[tuple[int, int]]
    doubtful: frozenset[tuple[int, int]]
    thumbnail: Thumbnail
    tissue: Tissue
    reason: str

    @property
    def in_grid(self) -> int:
        """Tiles that fit into the slide."""
        return self.grid[0] * self.grid[1]


def plan_tiles(slide: Slide, tile_size: int, mpp: float, min_tissue: float = 0.5) -> TilePlan:
    """Choose the tiles of a slide.

    Args:
        slide: an open slide.
        tile_size: rows and columns of a tile.
        mpp: micrometres per pixel of the tiles.
        min_tissue: part of a tile that must be tissue, 0 (all tiles) to 1.

    Raises:
        SlideError: the slide does not say its resolution, or it is coarser than `mpp`.
    """
    own = slide.mpp
    if mpp < _FINEST * own:
        raise SlideError(
            f"slide {slide.path} has {own:g} micrometres per pixel and cannot give {mpp:g}; "
            f"ask for an mpp of {own:g} or more"
        )
    height, width = slide.size
    scale = slide.scale(mpp)
    step = tile_size * scale
    grid = int(height / step + _SLACK), int(width / step + _SLACK)
    thumbnail = slide.thumbnail(_thumbnail_scale(slide, step))
    tissue = find_tissue(thumbnail)
    sure = _fractions(tissue.mask, grid, step / thumbnail.scale)
    possible = _fractions(tissue.mask | tissue.unknown, grid, step / thumbnail.scale)
    places, doubtful = [], []
    for row, col in zip(*np.nonzero(possible >= min_tissue), strict=True):
        places.append((round(col * step), round(row * step)))
        if sure[row, col] < min_tissue:
            doubtful.append(places[-1])
    reason = "" if places else _why_none(slide, step, possible, min_tissue)
    return TilePlan(
        tile_size,
        min_tissue,
        scale,
        step,
        grid,
        places,
        frozenset(doubtful),
        thumbnail,
        tissue,
        reason,
    )


class CutTile(NamedTuple):
    """A tile as cut: level-0 `x`, `y`, and the image, uint8 (rows, cols, 3).

    Where there is no image, `problem` says why it could not be read; empty, the tile turned out
    to have too little tissue.
    """

    x: int
    y: int
    image: npt.NDArray[np.uint8] | None
    problem: str


def cut_tiles(slide: Slide, plan: TilePlan) -> Iterator[CutTile]:
    """Read the tiles of a plan in order, one for each of its places."""
    size = (plan.tile_size, plan.tile_size)
    for x, y in plan.places:
        try:
            image = slide.read_scaled(x, y, size, plan.scale)
        except SlideError as error:
            yield CutTile(x, y, None, str(error))
            continue
        if (x, y) in plan.doubtful and plan.tissue.part_of(image) < plan.min_tissue:
            yield CutTile(x, y, None, "")
        else:
            yield CutTile(x, y, image, "")


def _thumbnail_scale(slide: Slide, step: float) -> float:
    scale = min(_MASK_MPP / slide.mpp, step / _PIXELS_PER_TILE)
    return max(1.0, scale, max(slide.size) / _LONGEST_THUMBNAIL)


def _fractions(
    tissue: npt.NDArray[np.bool_], grid: tuple[int, int], step: float
) -> npt.NDArray[np.float64]:
    """Part of each tile that is tissue; `step` is the side of a tile in pixels of the mask."""
    total = np.zeros((tissue.shape[0] + 1, tissue.shape[1] + 1))
    total[1:, 1:] = tissue.cumsum(0).cumsum(1)
    edges = [
        np.minimum(np.rint(np.arange(n + 1) * step).astype(int), size)
        for n, size in zip(grid, tissue.shape, strict=True)
    ]
    # a tile smaller than a pixel of the mask takes that of the pixel it begins in
    first = [np.minimum(e[:-1], size - 1) for e, size in zip(edges, tissue.shape, strict=True)]
    last = [np.maximum(e[1:], f + 1) for e, f in zip(edges, first, strict=True)]
    area = (last[0] - first[0])[:, None] * (last[1] - first[1])[None, :]
    inside = (
        total[np.ix_(last[0], last[1])]
        - total[np.ix_(first[0], last[1])]
        - total[np.ix_(last[0], first[1])]
        + total[np.ix_(first[0], first[1])]
    )
    return np.asarray(inside / area, np.float64)


def _why_none(
    slide: Slide, step: float, fractions: npt.NDArray[np.float64], min_tissue: float
) -> str:
    if 0 in fractions.shape:
        height, width = slide.size
        return (
            f"smaller than a tile: it has {height} x {width} pixels, a tile spans {step:.0f} of "
            "them; ask for smaller tiles or a smaller mpp"
        )
    best = float(fractions.max())
    if best == 0:
        return f"no tissue found in any of {fractions.size} tiles"
    return (
        f"none of {fractions.size} tiles has {min_tissue:.0%} tissue, the best has {best:.0%}; "
        "lower --min-tissue"
    )
