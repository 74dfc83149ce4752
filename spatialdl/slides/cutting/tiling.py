"""Which tiles of a slide are worth cutting: a grid at one resolution, kept where tissue is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.errors import SlideError
from spatialdl.slides.finding.regions import Region, class_map, class_names
from spatialdl.slides.finding.tissue import Tissue, find_tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail
from spatialdl.slides.reading.wanted import Wanted

Edges = npt.NDArray[np.int64]

_MASK_MPP = 8.0  # fine enough to see glands, coarse enough for one look
_PIXELS_PER_TILE = 16  # of the thumbnail, so that a part of a tile can be told
_LONGEST_THUMBNAIL = 4096
_FINER = 4  # than the thumbnail are regions drawn, if that is not larger than the longest one
_SLACK = 0.01  # part of a tile that may lie beyond the edge (sizes are rounded)


@dataclass(frozen=True)
class TilePlan:
    """The tiles of one slide.

    Attributes:
        tile_size, min_tissue: what was asked for.
        scale: level-0 pixels per pixel of a tile.
        step: level-0 pixels that a tile spans, along one dim.
        stride: level-0 pixels from a tile to the next; less than `step` where they overlap.
        grid: rows and columns of tiles that fit into the slide.
        places: level-0 (x, y) of the top-left corners of the tiles that are kept.
        labels: for each of them the class of the region that it lies in, None without one.
        with_tissue: tiles with enough tissue.
        unannotated: those of them that are not kept, because too little of them is annotated.
        doubtful: those of them that lie where the thumbnail could not be read; they are looked
            at when they are cut.
        thumbnail, tissue: what the choice was made on.
        reason: why no tile is kept; empty if some are.
    """

    tile_size: int
    min_tissue: float
    scale: float
    step: float
    stride: float
    grid: tuple[int, int]
    places: list[tuple[int, int]]
    labels: list[str | None]
    with_tissue: int
    unannotated: int
    doubtful: frozenset[tuple[int, int]]
    thumbnail: Thumbnail
    tissue: Tissue
    reason: str

    @property
    def in_grid(self) -> int:
        """Tiles that fit into the slide."""
        return self.grid[0] * self.grid[1]

    def part(self, first: int, last: int) -> TilePlan:
        """The plan of the tiles from `first` up to `last`, small: its pictures are left out."""
        places = self.places[first:last]
        nothing = np.zeros((0, 0), bool)
        return replace(
            self,
            places=places,
            labels=self.labels[first:last],
            doubtful=self.doubtful.intersection(places),
            thumbnail=Thumbnail(np.zeros((0, 0, 3), np.uint8), nothing, self.thumbnail.scale),
            tissue=self.tissue._replace(mask=nothing, unknown=nothing),
        )


def plan_tiles(
    slide: Slide,
    tile_size: int,
    wanted: Wanted | float,
    min_tissue: float = 0.5,
    *,
    overlap: int = 0,
    finder: Callable[[Thumbnail], Tissue] = find_tissue,
    regions: Sequence[Region] | None = None,
    beyond: bool = True,
) -> TilePlan:
    """Choose the tiles of a slide.

    Parts of a tile are told on the pixels of the thumbnail: 8 micrometres or a sixteenth of a
    tile, whichever is finer; coarser where the thumbnail would have more than 4096 of them along
    a side. Regions are drawn four times finer within the same limit.

    Args:
        slide: an open slide.
        tile_size: rows and columns of a tile.
        wanted: resolution of the tiles; a number is micrometres per pixel.
        min_tissue: part of a tile that must be tissue, 0 (all tiles) to 1.
        overlap: rows and columns that neighbouring tiles share, in pixels of a tile.
        finder: marks the tissue of a thumbnail.
        regions: where tiles may lie, if not everywhere. A tile has the class that covers most of
            it, if that is at least `min_tissue` of it; else it is not kept.
        beyond: tiles may end beyond the edge of the slide by a hundredth of their side, since
            sizes are rounded.

    Raises:
        SlideError: the slide does not say its resolution, or it is coarser than wanted.
        ValueError: `overlap` is not between 0 and `tile_size` - 1.
    """
    if not 0 <= overlap < tile_size:
        raise ValueError(f"overlap is {overlap}, expected 0 to {tile_size - 1}: less than a tile")
    scale = (wanted if isinstance(wanted, Wanted) else Wanted(mpp=wanted)).scale(slide)
    height, width = slide.size
    step, stride = tile_size * scale, (tile_size - overlap) * scale
    needed = step * (1 - _SLACK) if beyond else step
    grid = _fitting(height, needed, stride), _fitting(width, needed, stride)
    thumbnail = slide.thumbnail(_thumbnail_scale(slide, step))
    tissue = finder(thumbnail)
    tiles = _Tiles(grid, step / thumbnail.scale, stride / thumbnail.scale)
    sure = tiles.fractions(tissue.mask)
    possible = tiles.fractions(tissue.mask | tissue.unknown)
    with_tissue = possible >= min_tissue
    kept, labels = with_tissue, np.full(grid, None)
    reason = "" if with_tissue.any() else _why_none(slide, step, possible, min_tissue)
    if regions is not None:
        covered, labels = _covered(regions, tiles, thumbnail)
        kept = with_tissue & (covered >= min_tissue) & (covered > 0)
        if not reason and not kept.any():
            reason = _why_unannotated(regions, covered, min_tissue, int(with_tissue.sum()))
    places, doubtful = [], []
    for row, col in zip(*np.nonzero(kept), strict=True):
        places.append((round(col * stride), round(row * stride)))
        if sure[row, col] < min_tissue:
            doubtful.append(places[-1])
    return TilePlan(
        tile_size,
        min_tissue,
        scale,
        step,
        stride,
        grid,
        places,
        labels[kept].tolist(),
        int(with_tissue.sum()),
        int(with_tissue.sum()) - len(places),
        frozenset(doubtful),
        thumbnail,
        tissue,
        reason,
    )


class CutTile(NamedTuple):
    """A tile as cut: level-0 `x`, `y`, its class, and the image, uint8 (rows, cols, 3).

    Where there is no image, `problem` says why it could not be read, or `bare` that the tile
    turned out to have too little tissue, or else nobody asked for it.
    """

    x: int
    y: int
    label: str | None
    image: npt.NDArray[np.uint8] | None = None
    problem: str = ""
    bare: bool = False


def cut_tiles(slide: Slide, plan: TilePlan, *, read: bool = True) -> Iterator[CutTile]:
    """The tiles of a plan in order, one for each of its places.

    Args:
        slide: open.
        plan: its tiles.
        read: false reads only those that have to be looked at to tell whether they have tissue.
    """
    size = (plan.tile_size, plan.tile_size)
    for (x, y), label in zip(plan.places, plan.labels, strict=True):
        doubtful = (x, y) in plan.doubtful
        if not (read or doubtful):
            yield CutTile(x, y, label)
            continue
        try:
            image = slide.read_scaled(x, y, size, plan.scale)
        except SlideError as error:
            yield CutTile(x, y, label, problem=str(error))
            continue
        if doubtful and plan.tissue.part_of(image) < plan.min_tissue:
            yield CutTile(x, y, label, bare=True)
        else:
            yield CutTile(x, y, label, image)


def _thumbnail_scale(slide: Slide, step: float) -> float:
    scale = step / _PIXELS_PER_TILE
    if slide.known_mpp is not None:
        scale = min(_MASK_MPP / slide.known_mpp, scale)
    return max(1.0, scale, max(slide.size) / _LONGEST_THUMBNAIL)


def _fitting(length: int, needed: float, stride: float) -> int:
    """How many tiles fit into a length, where each needs so much of it."""
    room = length - needed
    return int(room / stride) + 1 if room >= 0 else 0


@dataclass(frozen=True)
class _Tiles:
    """A grid of tiles on a thumbnail, whose pixels `step` and `stride` are."""

    grid: tuple[int, int]
    step: float
    stride: float

    def fractions(self, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """Part of each tile that is in the mask."""
        total = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1), np.int32)
        np.cumsum(mask, 0, out=total[1:, 1:])
        np.cumsum(total, 1, out=total)
        top, bottom = self._edges(0, mask.shape[0])
        left, right = self._edges(1, mask.shape[1])
        inside = total[np.ix_(bottom, right)] - total[np.ix_(top, right)]
        inside += total[np.ix_(top, left)] - total[np.ix_(bottom, left)]
        area = (bottom - top)[:, None] * (right - left)[None, :]
        return np.asarray(inside / area, np.float64)

    def _edges(self, dim: int, size: int) -> tuple[Edges, Edges]:
        start = np.arange(self.grid[dim]) * self.stride
        # a tile smaller than a pixel of the mask takes that of the pixel it begins in
        first = np.minimum(np.rint(start).astype(np.int64), size - 1)
        last = np.minimum(np.rint(start + self.step).astype(np.int64), size)
        return first, np.maximum(last, first + 1)


def _covered(
    regions: Sequence[Region], tiles: _Tiles, thumbnail: Thumbnail
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.object_]]:
    """For each tile the part that is covered by the class that covers most of it, and its name."""
    names = class_names(regions)
    shape = thumbnail.missing.shape
    finer = max(1, min(_FINER, _LONGEST_THUMBNAIL // max(shape)))
    size = shape[0] * finer, shape[1] * finer
    classes = class_map(regions, size, thumbnail.scale / finer)
    tiles = _Tiles(tiles.grid, tiles.step * finer, tiles.stride * finer)
    most, labels = np.zeros(tiles.grid), np.full(tiles.grid, None)
    for index, name in enumerate(names, 1):
        part = tiles.fractions(classes == index)
        labels[part > most] = name
        most = np.maximum(most, part)
    return most, labels


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


def _why_unannotated(
    regions: Sequence[Region], covered: npt.NDArray[np.float64], min_tissue: float, tissue: int
) -> str:
    if not regions:
        return f"its annotations are empty ({tissue} tiles have enough tissue)"
    best = float(covered.max())
    if best == 0:
        return f"none of its {len(regions)} annotated regions meets a tile of the slide"
    return (
        f"none of {tissue} tiles with enough tissue lies in an annotated region by "
        f"{min_tissue:.0%}, the best tile by {best:.0%}; lower --min-tissue"
    )
