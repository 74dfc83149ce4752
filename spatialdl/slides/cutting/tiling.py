"""Selection of tiles, a grid restricted to tissue, or of the bounding box of all tissue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.errors import SlideError
from spatialdl.slides.cutting.grid import SLACK, Edge, TileGrid, Wanted, tile_starts
from spatialdl.slides.finding.annotations import NOTHING, Region, class_map, class_names
from spatialdl.slides.finding.tissue import Tissue, find_tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail

# the thumbnail depends on the slide alone, so that its tissue is the same for all tiles
_FINEST_MPP, _COARSEST_MPP = 1.0, 8.0  # micrometres per pixel: nuclei, glands
_LONG_THUMBNAIL, _LONGEST_THUMBNAIL = 2048, 4096  # pixels along the longer side
_FINER = 4  # factor by which regions are drawn finer than the thumbnail, up to the longest one
_MUCH = 0.05  # part of the tissue outside of the grid that causes a remark
_BLACK, _DARK = (0, 0, 0), 50  # background of dark slides; brightest background of these


@dataclass(frozen=True)
class TilePlan:
    """The tiles of one slide.

    Attributes:
        tile_size, min_tissue: as requested.
        scale: level-0 pixels per pixel of a tile.
        step: level-0 pixels that a tile spans, along one dim.
        stride: level-0 pixels from a tile to the next; less than `step` if they overlap.
        grid: rows and columns of tiles.
        tissue_part: part of the slide that is tissue, 0 to 1.
        outside: part of the tissue outside of the grid.
        places: level-0 (x, y) of the top-left corners of the selected tiles.
        labels: for each of them the class of its region, None without one.
        with_tissue: number of tiles with enough tissue.
        unannotated: number of these that are not selected, with too little annotated.
        doubtful: places where the thumbnail was unreadable; tissue is checked when they are cut.
        thumbnail, tissue: basis of the selection.
        background: colour beyond the slide.
        reason: why no tile is selected; empty if some are.
    """

    tile_size: int
    min_tissue: float
    scale: float
    step: float
    stride: float
    grid: tuple[int, int]
    tissue_part: float
    outside: float
    places: list[tuple[int, int]]
    labels: list[str | None]
    with_tissue: int
    unannotated: int
    doubtful: frozenset[tuple[int, int]]
    thumbnail: Thumbnail
    tissue: Tissue
    background: tuple[int, int, int]
    reason: str

    @property
    def in_grid(self) -> int:
        """Number of tiles of the grid."""
        return self.grid[0] * self.grid[1]

    def part(self, first: int, last: int) -> TilePlan:
        """Return the plan of tiles [first, last), without pictures, small enough to send."""
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
    edge: Edge = "drop",
    finder: Callable[[Thumbnail], Tissue] = find_tissue,
    regions: Sequence[Region] | None = None,
    outside_class: str | None = None,
    beyond: bool = True,
) -> TilePlan:
    """Select the tiles of a slide.

    Tissue is found on a thumbnail of about 2048 pixels along the longer side, each of 1 to 8
    micrometres (coarser if there would be more than 4096 pixels): it depends on the slide, never
    on the tiles. Regions are drawn up to four times finer, within the same limit. Pixels partly
    covered by a tile count in proportion.

    Args:
        slide: an open slide.
        tile_size: rows and columns of a tile.
        wanted: resolution of the tiles; a number is micrometres per pixel.
        min_tissue: part of a tile that must be tissue, 0 (all tiles) to 1.
        overlap: rows and columns that neighbouring tiles share, in pixels of a tile.
        edge: how to cover the strip between the last row or column of whole tiles and the edge of
            the slide. "drop": not at all. "pad": with a tile that ends beyond the slide, in its
            background. "shift": with a tile that ends at the edge of the slide, so that it
            overlaps its neighbour by more; slides smaller than a tile have none.
        finder: finds the tissue of a thumbnail.
        regions: annotated regions; None selects tiles everywhere. A tile has the class that covers
            the largest part of it, if that is at least `min_tissue`; else it is not selected.
        outside_class: if given, also select tiles with at least `min_tissue` of their area in the
            slide and in no region, with this class.
        beyond: tiles may end beyond the edge of the slide by a hundredth of their side, since
            sizes are rounded.

    Raises:
        SlideError: the slide has no resolution, or a coarser one than `wanted`.
        ValueError: `overlap` is not between 0 and `tile_size` - 1.
    """
    if not 0 <= overlap < tile_size:
        raise ValueError(f"overlap is {overlap}, expected 0 to {tile_size - 1}, less than a tile")
    scale = (wanted if isinstance(wanted, Wanted) else Wanted(mpp=wanted)).scale(slide)
    step, stride = tile_size * scale, (tile_size - overlap) * scale
    needed = step * (1 - SLACK) if beyond else step
    rows, cols = (tile_starts(length, needed, (step, stride, scale), edge) for length in slide.size)
    starts = rows, cols
    thumbnail, tissue = _thumbnail_and_tissue(slide, finder)
    tiles = TileGrid(starts, step, slide.size).scaled(1 / thumbnail.scale)
    grid = tiles.grid
    tissue_part, outside = tiles.shares(tissue.mask)
    sure = tiles.fractions(tissue.mask)
    unknown = tissue.unknown.any()
    possible = tiles.fractions(tissue.mask | tissue.unknown) if unknown else sure
    with_tissue = possible >= min_tissue
    kept, labels = with_tissue, np.full(grid, None)
    reason = "" if with_tissue.any() else _why_none(slide, step, possible, min_tissue, edge)
    if regions is not None:
        covered, labels, free = _covered(regions, tiles, thumbnail)
        inside = (covered >= min_tissue) & (covered > 0)
        kept = with_tissue & inside
        if outside_class is not None:
            in_no_region = with_tissue & ~inside & (free >= min_tissue)
            labels[in_no_region] = outside_class
            kept |= in_no_region
        if not reason and not kept.any():
            reason = _why_unannotated(regions, covered, min_tissue, int(with_tissue.sum()))
    places, doubtful = [], []
    for row, col in zip(*np.nonzero(kept), strict=True):
        places.append((round(starts[1][col]), round(starts[0][row])))
        if sure[row, col] < min_tissue:
            doubtful.append(places[-1])
    return TilePlan(
        tile_size,
        min_tissue,
        scale,
        step,
        stride,
        grid,
        tissue_part,
        outside,
        places,
        labels[kept].tolist(),
        int(with_tissue.sum()),
        int(with_tissue.sum()) - len(places),
        frozenset(doubtful),
        thumbnail,
        tissue,
        slide.background,
        reason,
    )


def outside_remark(plan: TilePlan) -> str:
    """Return a remark on the tissue of a slide in no tile; empty if it is little."""
    if plan.outside < _MUCH:
        return ""
    return (
        f"{plan.outside:.0%} of its tissue is in no tile: at the right and bottom edges no whole "
        "tile fits; --edge pad or --edge shift includes it"
    )


class CutTile(NamedTuple):
    """A cut tile: level-0 `x`, `y`, its class, and the image, uint8 (rows, cols, 3).

    The image is None if it could not be read (`problem` is the error), if the tile turned out to
    have too little tissue (`bare`), or if it was not requested.
    """

    x: int
    y: int
    label: str | None
    image: npt.NDArray[np.uint8] | None = None
    problem: str = ""
    bare: bool = False


def cut_tiles(slide: Slide, plan: TilePlan, *, read: bool = True) -> Iterator[CutTile]:
    """Cut the tiles of a plan, in the order of its places.

    Args:
        slide: open.
        plan: its tiles.
        read: false reads only doubtful tiles, to check their tissue.
    """
    size = (plan.tile_size, plan.tile_size)
    slide.background = plan.background
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


def _thumbnail_and_tissue(
    slide: Slide, finder: Callable[[Thumbnail], Tissue]
) -> tuple[Thumbnail, Tissue]:
    """A thumbnail and its tissue; sets a black background for dark slides with a bright one."""
    thumbnail = slide.thumbnail(_thumbnail_scale(slide))
    tissue = finder(thumbnail)
    if tissue.dark and max(slide.background) > _DARK:
        slide.background = _BLACK
        if thumbnail.empty is not None:  # empty places and their rims have the old background
            thumbnail = slide.thumbnail(thumbnail.scale)
            tissue = finder(thumbnail)
    return thumbnail, tissue


def _thumbnail_scale(slide: Slide) -> float:
    longest, mpp = max(slide.size), slide.known_mpp
    scale = longest / _LONG_THUMBNAIL
    if mpp is not None:
        scale = min(max(_FINEST_MPP / mpp, scale), _COARSEST_MPP / mpp)
    return max(1.0, scale, longest / _LONGEST_THUMBNAIL)


def _covered(
    regions: Sequence[Region], tiles: TileGrid, thumbnail: Thumbnail
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.object_], npt.NDArray[np.float64]]:
    """For each tile the part covered by its main class, its name, and the part in no region."""
    names = class_names(regions)
    shape = thumbnail.missing.shape
    finer = max(1, min(_FINER, _LONGEST_THUMBNAIL // max(shape)))
    size = shape[0] * finer, shape[1] * finer
    classes = class_map(regions, size, thumbnail.scale / finer)
    tiles = tiles.scaled(finer)
    most, labels = np.zeros(tiles.grid), np.full(tiles.grid, None)
    for index, name in enumerate(names, 1):
        part = tiles.fractions(classes == index)
        labels[part > most] = name
        most = np.maximum(most, part)
    return most, labels, tiles.fractions(classes == NOTHING)


def _why_none(
    slide: Slide,
    step: float,
    fractions: npt.NDArray[np.float64],
    min_tissue: float,
    edge: Edge,
) -> str:
    if 0 in fractions.shape:
        height, width = slide.size
        what = "cannot be shifted into it" if edge == "shift" else "does not fit"
        return (
            f"smaller than a tile: it has {height} x {width} pixels, a tile spans {step:.0f} of "
            f"them and {what}; set a smaller tile size, a smaller mpp, or --edge pad"
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
        return f"none of its {len(regions)} annotated regions overlaps a tile of the slide"
    return (
        f"none of {tissue} tiles with enough tissue has {min_tissue:.0%} of its area in an "
        f"annotated region, the best has {best:.0%}; lower --min-tissue"
    )


Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class WholePlan:
    """One region of a slide.

    Attributes:
        x, y: level-0 pixel of its top-left corner.
        size: its rows and columns.
        scale: level-0 pixels per pixel of the region.
    """

    x: int
    y: int
    size: tuple[int, int]
    scale: float

    @property
    def span(self) -> tuple[float, float]:
        """Level-0 rows and columns."""
        return self.size[0] * self.scale, self.size[1] * self.scale


def plan_whole(slide: Slide, plan: TilePlan) -> WholePlan | None:
    """Plan the bounding box of the tissue of a slide.

    It begins at a pixel of the level that is read, or at a tile if the level has JPEG tiles, so
    that no pixel is interpolated and no tile is cut.

    Args:
        slide: open.
        plan: of tiles, at the resolution of the region; the tissue is that of its thumbnail.

    Returns:
        The region, None if there is no tissue.
    """
    mask = plan.tissue.mask
    if not mask.any():
        return None
    grid = slide.jpeg_grid(plan.scale)
    level = slide.level(plan.scale)
    down = slide.downsamples[level]
    sides = []
    for dim in (0, 1):
        seen = np.flatnonzero(mask.any(1 - dim))
        unit = down * (1 if grid is None else grid.chunk[dim])
        first = int(seen[0] * plan.thumbnail.scale / unit) * unit
        last = end = slide.level_size(level)[dim] * down
        if seen[-1] + 1 < mask.shape[dim]:  # else up to the edge, which the mask may not reach
            last = min((seen[-1] + 1) * plan.thumbnail.scale, end)
        sides.append((round(first), max(1, int((last - first) / plan.scale))))
    (y, rows), (x, cols) = sides
    return WholePlan(x, y, (rows, cols), plan.scale)


class WholeImage:
    """A region that is read by rows: `image[row0:row1]`.

    Args:
        slide: open.
        plan: the region.
    """

    def __init__(self, slide: Slide, plan: WholePlan) -> None:
        self._slide = slide
        self._plan = plan
        self.shape = (*plan.size, 3)

    def __getitem__(self, rows: slice) -> Bytes:
        """Read rows, uint8 (rows, cols, 3).

        Raises:
            SlideError: the file is damaged there.
        """
        first, last, _ = rows.indices(self.shape[0])
        plan = self._plan
        box = (first, last, 0, plan.size[1])
        return self._slide.read_box(plan.x, plan.y, plan.size, plan.scale, box)
