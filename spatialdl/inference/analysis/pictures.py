"""Pictures of clusters, projections, regressions and neighbours, with the slides under them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from spatialdl.common.text import fitted
from spatialdl.errors import SlideError
from spatialdl.inference.predicting.pictures import (
    SMALL,
    TITLE,
    add_legend,
    colours_of,
    new_figure,
    new_panels,
    save_figure,
    style_axes,
)
from spatialdl.inference.predicting.slide_paths import slide_paths
from spatialdl.slides.reading.paths import slide_aliases
from spatialdl.slides.reading.reader import Slide

_NAME = 28  # letters of a panel title
_SIDE = 3.2  # side of a panel in inches
_MISSING = (0.75, 0.75, 0.75)
_OVERVIEW = 500  # longer side in pixels
_TILE = 160

Read = TypeVar("Read")


Picture = npt.NDArray[np.uint8]


class SlidePictures:
    """Overviews and tiles of slides, by the names of their feature files.

    Args:
        paths: slides, folders and patterns; may be empty.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        found = slide_paths(list(paths)) if paths else []
        self._paths = {name: path for path in found for name in reversed(slide_aliases(path))}
        self._unreadable: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._paths)

    def summary(self) -> dict[str, Any]:
        """Errors of unreadable slides, by name."""
        return {"slides_not_shown": self._unreadable} if self._unreadable else {}

    def overview(self, name: str) -> tuple[Picture, float] | None:
        """Overview of a slide, and level-0 pixels per pixel; None if missing or unreadable."""

        def read(slide: Slide) -> tuple[Picture, float]:
            found = slide.thumbnail(max(1.0, max(slide.size) / _OVERVIEW))
            return found.image, found.scale

        return self._read(name, read)

    def scanned_from(self, name: str) -> tuple[int, int]:
        """Level-0 x and y from which QuPath counts; (0, 0) if the slide is missing."""
        return self._read(name, lambda slide: slide.scanned[:2]) or (0, 0)

    def tile(self, name: str, place: tuple[int, int], span: float) -> Picture | None:
        """Tile at level-0 x and y, `span` level-0 pixels wide; None if missing or unreadable."""
        side = int(min(_TILE, max(1.0, span)))
        scale = max(1.0, span / side)
        return self._read(name, lambda slide: slide.read_scaled(*place, (side, side), scale))

    def _read(self, name: str, read: Callable[[Slide], Read]) -> Read | None:
        if name not in self._paths:
            return None
        try:
            with Slide(self._paths[name]) as slide:
                return read(slide)
        except SlideError as error:
            self._unreadable[name] = str(error)
            return None


class SlideMap(NamedTuple):
    """Clusters of the tiles of a slide.

    Attributes:
        name: slide name.
        coords: (tiles, 2), level-0 x and y.
        clusters: (tiles,).
        span: side of a tile in level-0 pixels.
        picture: (rows, cols, 3), overview of the slide, or None.
        scale: level-0 pixels per pixel of the picture.
    """

    name: str
    coords: npt.NDArray[np.int64]
    clusters: npt.NDArray[Any]
    span: float
    picture: npt.NDArray[np.uint8] | None = None
    scale: float = 1.0


def draw_maps(path: Path, maps: Sequence[SlideMap], clusters: int) -> None:
    """Draw maps of the clusters of tiles, over the slide if there is a picture."""
    from matplotlib.collections import PolyCollection

    columns = math.ceil(math.sqrt(len(maps))) + 1
    figure, panels = new_panels(len(maps), columns, _SIDE, _SIDE)
    for panel, one in zip(panels, maps, strict=False):
        panel.set_title(fitted(one.name, _NAME), fontsize=TITLE)
        panel.set_aspect("equal")
        x, y = (one.coords / one.scale).T
        side = one.span / one.scale
        corners = np.stack([x, y, x + side, y, x + side, y + side, x, y + side], 1)
        if one.picture is not None:
            panel.imshow(one.picture)
        boxes = PolyCollection(
            list(corners.reshape(-1, 4, 2)),
            facecolors=colours_of(one.clusters),
            alpha=1.0 if one.picture is None else 0.55,
            linewidths=0,
        )
        panel.add_collection(boxes)
        if one.picture is None and len(one.coords):
            panel.set(xlim=(x.min(), x.max() + side), ylim=(y.max() + side, y.min()))
    colours = {str(k): colour for k, colour in enumerate(colours_of(range(clusters)).tolist())}
    add_legend(figure, colours, "cluster")
    save_figure(path, figure)


def draw_projection(
    path: Path,
    points: npt.NDArray[np.float64],
    groups: Sequence[str],
    numbers: npt.NDArray[np.float64] | None,
    titles: tuple[str, str],
    legend: str,
) -> None:
    """Draw the first two components of tiles.

    Args:
        path: output file.
        points: (tiles, 2).
        groups: group of each tile, by colour; empty is grey.
        numbers: values that replace groups, by colour map; NaN is grey.
        titles: titles of the axes.
        legend: title of the legend.
    """
    figure = new_figure(7.0, 6.0)
    panel = figure.subplots()
    order = np.random.RandomState(0).permutation(len(points))  # so that no group covers the rest
    size = float(np.clip(15_000 / max(1, len(points)), 2, 16))
    x, y = points[order].T
    if numbers is not None:
        values = numbers[order]
        panel.scatter(x, y, s=size, color=_MISSING, linewidths=0)
        seen = np.isfinite(values)
        marks = panel.scatter(x[seen], y[seen], s=size, c=values[seen], cmap="viridis", lw=0)
        figure.colorbar(marks, ax=panel, label=legend)
    else:
        names = sorted({name for name in groups if name})
        colours = dict(zip(names, colours_of(range(len(names))).tolist(), strict=True))
        of_points = np.array([colours.get(name, _MISSING) for name in groups]).reshape(-1, 3)
        panel.scatter(x, y, s=size, c=of_points[order], linewidths=0)
        add_legend(figure, colours, legend)
    style_axes(panel, titles[0], titles[1])
    save_figure(path, figure)


def draw_tiles(
    path: Path,
    rows: Sequence[Sequence[tuple[str, npt.NDArray[np.uint8] | None]]],
) -> None:
    """Draw tiles with captions, a query and its neighbours in each row."""
    columns = max(map(len, rows))
    figure = new_figure(1.7 * columns, 2.15 * len(rows))
    panels = figure.subplots(len(rows), columns, squeeze=False)
    for line, row in zip(panels, rows, strict=True):
        for panel in line[len(row) :]:
            panel.axis("off")
        for panel, (caption, tile) in zip(line, row, strict=False):
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set_color("#c0c0c0")  # a visible frame for white tiles
            panel.set_title(caption, fontsize=7)
            if tile is not None:
                panel.imshow(tile)
            else:
                panel.text(0.5, 0.5, "no picture", ha="center", va="center", fontsize=SMALL)
    save_figure(path, figure)
