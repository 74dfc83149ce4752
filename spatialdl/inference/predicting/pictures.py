"""Pictures of a slide: maps per class as pyramidal TIFFs, and drawn over the slide."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from spatialdl.common.text import fitted
from spatialdl.data.saving import replacing
from spatialdl.slides.finding.tissue import find_tissue
from spatialdl.slides.pyramid import TILE, write_pyramid
from spatialdl.slides.reading.reader import Slide, Thumbnail

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Bands = Iterator[npt.NDArray[Any]]
Array = npt.NDArray[Any]
ROWS = 2 * TILE
"""Rows of a band."""
LONGEST = 1600
"""Longer side of an overview map at most, in pixels."""
HEAT_COLOURS, HEAT_OPACITY = "turbo", 0.65
"""Colour map and opacity of heat maps over pictures."""
MOST = 8
"""Number of classes drawn at most."""
_THUMBNAIL = 1600  # longer side of a slide's thumbnail, in pixels
_PANEL_INCHES, _MOST_INCHES = 4.6, 7.0
_LEAST = 8
"""Least pixels of a map along a tile's side, to resolve overlaps."""


def faint(image: npt.NDArray[np.uint8]) -> Array:
    """Convert an image to light grey (rows, columns), so that overlaid colours stay true."""
    return np.asarray(255 - (255 - image.mean(2)) * 0.6)


class ClassMap(Protocol):
    """A map per class over a slide; iterating bands is collective, rank 0 gets the values."""

    @property
    def size(self) -> tuple[int, int]: ...

    def bands(self, column: int, rows: int) -> Bands: ...


class TileMap:
    """A map of tile values at their positions; the mean where tiles overlap.

    Args:
        places: (N, 2), level-0 x and y of the tiles.
        span: level-0 rows and columns of a tile.
        extent: level-0 rows and columns of the slide.
        values: (N, classes, rows, columns), a grid of values over each tile.

    Attributes:
        scale: level-0 pixels per pixel of the map.
        size: rows and columns of the map.
    """

    def __init__(
        self,
        places: npt.NDArray[np.int64],
        span: tuple[float, float],
        extent: tuple[int, int],
        values: npt.NDArray[Any],
    ) -> None:
        self.scale = max(1.0, span[0] / max(_LEAST, values.shape[2]))
        self.size = ceil(extent[0] / self.scale), ceil(extent[1] / self.scale)
        self._values = values
        self._rows = self._edges(places[:, 1], span[0])
        self._cols = self._edges(places[:, 0], span[1])

    def _edges(self, starts: npt.NDArray[Any], span: float) -> npt.NDArray[np.int64]:
        """(N, 2): first pixel of each tile, and one past its last."""
        first = np.rint(starts / self.scale)
        last = np.maximum(np.rint((starts + span) / self.scale), first + 1)
        return np.stack([first, last], 1).astype(np.int64)

    def bands(self, column: int, rows: int) -> Iterator[npt.NDArray[np.float64]]:
        """Iterate over the map of a class, `rows` rows at a time; NaN outside tiles."""
        for first in range(0, self.size[0], rows):
            last = min(first + rows, self.size[0])
            sums = np.zeros((last - first, self.size[1]))
            counts = np.zeros(sums.shape, np.int32)
            inside = (self._rows[:, 0] < last) & (self._rows[:, 1] > first)
            for number in np.flatnonzero(inside).tolist():
                place, part = self._part(number, column, first, last)
                sums[place] += part
                counts[place] += 1
            with np.errstate(invalid="ignore"):
                yield sums / counts

    def _part(self, number: int, column: int, first: int, last: int) -> tuple[Any, Any]:
        """The slice of a tile within a band, and its values there."""
        (top, bottom), (left, right) = self._rows[number], self._cols[number]
        values = self._values[number, column]
        row0, row1 = max(first, top), min(last, bottom)
        # a tile may end beyond the slide
        col0, col1 = max(0, left), max(0, left, min(self.size[1], right))
        at_rows = (np.arange(row0, row1) - top) * values.shape[0] // (bottom - top)
        at_cols = (np.arange(col0, col1) - left) * values.shape[1] // (right - left)
        return np.s_[row0 - first : row1 - first, col0:col1], values[np.ix_(at_rows, at_cols)]


class Overview:
    """A downsampled map of one class, accumulated band by band.

    Args:
        size: rows and columns of the full map.

    Attributes:
        factor: downsampling factor along each dim.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self.factor = max(1, ceil(max(size) / LONGEST))
        shape = ceil(size[0] / self.factor), ceil(size[1] / self.factor)
        self._sums, self._counts, self._row = np.zeros(shape), np.zeros(shape), 0

    def accumulate(self, bands: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
        """Accumulate and pass through the bands, from top to bottom."""
        for band in bands:
            if not band.size:  # on ranks that have no values
                yield band
                continue
            known = np.isfinite(band)
            at = (self._row + np.arange(len(band))) // self.factor
            self._row += len(band)
            for total, values in ((self._sums, np.where(known, band, 0)), (self._counts, known)):
                starts = range(0, band.shape[1], self.factor)
                np.add.at(total, at, np.add.reduceat(values, starts, axis=1, dtype=np.float64))
            yield band

    @property
    def means(self) -> npt.NDArray[np.float64]:
        """The overview (rows, columns), NaN where the map has no value."""
        with np.errstate(invalid="ignore"):
            return self._sums / self._counts


def save_class_map(
    path: Path | None,
    found: ClassMap,
    column: int,
    limits: tuple[float, float],
    mpp: float | None,
    tags: Mapping[str, Any],
) -> Array:
    """Write the map of a class as a pyramid, in values of 1 to 255; collective.

    Args:
        path: the file; None on ranks that do not write, and if only the overview is needed.
        column: index of the class.
        limits: values at 1 and at 255.
        mpp: micrometres per pixel, if known.
        tags: description of the values.

    Returns:
        The overview, valid on rank 0.
    """
    overview = Overview(found.size)
    bands = overview.accumulate(found.bands(column, ROWS))
    if path is None:
        for _ in bands:
            pass
        return overview.means
    about = {**tags, "value_at_1": limits[0], "value_at_255": limits[1], "not_examined": 0}
    write_pyramid(
        path,
        (as_bytes(band, limits) for band in bands),
        found.size,
        mpp,
        grey=True,
        empty=True,
        description=json.dumps(about),
    )
    return overview.means


def as_bytes(band: npt.NDArray[Any], limits: tuple[float, float]) -> npt.NDArray[np.uint8]:
    """Scale values within the limits to 1...255; NaN becomes 0."""
    shares = (np.nan_to_num(band, nan=limits[0]) - limits[0]) / (limits[1] - limits[0])
    levels = 1 + np.rint(254 * shares.clip(0, 1))
    return np.asarray(np.where(np.isnan(band), 0, levels), np.uint8)


# --- figures


def save_overlay(
    path: Path,
    title: str,
    maps: Mapping[str, npt.NDArray[Any]],
    scale: float,
    extent: tuple[int, int],
    thumbnail: Thumbnail | None,
    what: str,
    limits: tuple[float, float],
) -> None:
    """Draw the slide, then one panel per class.

    Args:
        maps: (rows, columns) by class name, NaN where nothing was predicted.
        scale: level-0 pixels per pixel of the maps.
        extent: level-0 rows and columns of the slide.
        thumbnail: thumbnail of the slide, if it is available.
        what: label of the colour bar, the maps' quantity.
        limits: values of the first and the last colour.
    """
    drawn = dict(list(maps.items())[:MOST])
    panels = len(drawn) + (thumbnail is not None)
    figure, axes = _panels(panels, extent[0] / extent[1])
    place = grey = None
    if thumbnail is not None:
        height, width = (thumbnail.scale * length for length in thumbnail.missing.shape)
        place = (0, width, height, 0)  # the last pixels may end beyond the slide
        grey = faint(thumbnail.image)
        axes[0].imshow(thumbnail.image, extent=place)
        axes[0].set_title("slide", fontsize=10)
        axes[0].set(xlim=(0, extent[1]), ylim=(extent[0], 0))
    image = None
    for panel, (name, values) in zip(axes[panels - len(drawn) :], drawn.items(), strict=False):
        if grey is not None:
            panel.imshow(grey, extent=place, cmap="gray", vmin=0, vmax=255)
        image = panel.imshow(
            np.ma.masked_invalid(values),
            extent=(0, values.shape[1] * scale, values.shape[0] * scale, 0),
            cmap=HEAT_COLOURS,
            vmin=limits[0],
            vmax=limits[1],
            alpha=HEAT_OPACITY if grey is not None else 1.0,
            interpolation="nearest",
        )
        panel.set_title(f"class {name}" if name.isdigit() else fitted(name, 40), fontsize=10)
        panel.set(xlim=(0, extent[1]), ylim=(extent[0], 0))
    if image is not None:
        characters = max(14, int(10 * figure.get_figheight()))  # that fit beside flat slides
        bar = figure.colorbar(image, ax=axes, shrink=0.8)
        bar.set_label(fill(what, characters), fontsize=9)
    hidden = len(maps) - len(drawn)
    more = f" (and {hidden} more classes)" if hidden else ""
    figure.suptitle(f"{fitted(title, 60)}{more}", fontsize=11)
    save_figure(path, figure)


def slide_thumbnail(slide: Slide) -> Thumbnail:
    """A thumbnail of the slide, contrast-stretched if it is dark."""
    found = slide.thumbnail(max(1.0, max(slide.size) / _THUMBNAIL))
    return found._replace(image=find_tissue(found).shown(found.image))


def new_figure(width: float, height: float, dpi: int = 130) -> Figure:
    """A figure of a size in inches, which needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def save_figure(path: Path, figure: Figure) -> None:
    """Write a figure as PNG, atomically."""
    with replacing(path) as out:
        figure.savefig(out, format="png")


def _panels(panels: int, steepness: float) -> tuple[Figure, list[Axes]]:
    """A figure of at least `panels` panels without axes.

    Args:
        steepness: rows of the slide divided by its columns.
    """
    cols = 2 if panels == 4 else min(panels, 3)
    rows = ceil(panels / cols)
    high = min(_MOST_INCHES, max(1.2, _PANEL_INCHES * steepness))
    figure = new_figure(_PANEL_INCHES * cols + 0.9, (high + 0.35) * rows + 0.5)
    axes = list(figure.subplots(rows, cols, squeeze=False).flat)
    for panel in axes:
        panel.set_axis_off()
    return figure, axes
