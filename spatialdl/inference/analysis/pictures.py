"""Pictures of clusters, projections, regressions and neighbours, with the slides under them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from spatialdl.common.text import fitted
from spatialdl.errors import SlideError
from spatialdl.inference.evaluating.pictures import draw_pairs
from spatialdl.inference.predicting.geojson import colour_of
from spatialdl.inference.predicting.pictures import new_figure, save_figure
from spatialdl.inference.predicting.slide_paths import slide_paths
from spatialdl.slides.reading.paths import slide_aliases
from spatialdl.slides.reading.reader import Slide

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LISTED = 12  # groups in a legend
_NAME = 28  # letters of a panel title
_SIDE = 3.2  # side of a panel in inches
_DPI = 150
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
    from matplotlib.patches import Patch

    figure, panels = _grid(len(maps))
    for panel, one in zip(panels, maps, strict=True):
        panel.set_title(fitted(one.name, _NAME), fontsize=9)
        panel.set_aspect("equal")
        panel.axis("off")
        x, y = (one.coords / one.scale).T
        side = one.span / one.scale
        corners = np.stack([x, y, x + side, y, x + side, y + side, x, y + side], 1)
        colours = _colours(one.clusters)
        if one.picture is not None:
            panel.imshow(one.picture)
        opaque = 1.0 if one.picture is None else 0.55
        boxes = PolyCollection(
            list(corners.reshape(-1, 4, 2)), facecolors=colours, alpha=opaque, linewidths=0
        )
        panel.add_collection(boxes)
        if one.picture is None and len(one.coords):
            panel.set(xlim=(x.min(), x.max() + side), ylim=(y.max() + side, y.min()))
    shown = range(min(clusters, 2 * _LISTED))
    handles = [Patch(color=_colours([k])[0], label=str(k)) for k in shown]
    more = f", the first {len(shown)} of {clusters}" if clusters > len(shown) else ""
    figure.legend(
        handles=handles,
        title=f"cluster{more}",
        loc="outside lower center",
        ncols=min(12, len(shown)),
        frameon=False,
        fontsize=8,
    )
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
    figure = new_figure(7.5, 5.5, _DPI)
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
        at = {name: number for number, name in enumerate(names)}
        colours = np.array([_colours([at[g]])[0] if g else _MISSING for g in groups]).reshape(-1, 3)
        panel.scatter(x, y, s=size, c=colours[order], linewidths=0)
        _name_groups(panel, names, legend)
    panel.set(xlabel=titles[0], ylabel=titles[1])
    panel.spines[["top", "right"]].set_visible(False)
    save_figure(path, figure)


def _name_groups(panel: Axes, names: Sequence[str], legend: str) -> None:
    """Draw a legend beside the panel, of at most `_LISTED` groups."""
    for number, name in enumerate(names[:_LISTED]):
        colour = _colours([number])
        panel.scatter([], [], s=25, c=colour, label=fitted(name, _NAME))
    rest = len(names) - _LISTED
    if rest > 0:
        panel.scatter([], [], s=0, label=f"and {rest} more")
    panel.legend(
        title=legend, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8
    )


def draw_regression(
    path: Path,
    pairs: npt.NDArray[np.float64],
    target: str,
    title: str,
) -> None:
    """Scatter plot of predicted over true values of slides, from pairs (slides, 2) of both."""
    figure = new_figure(5, 5, _DPI)
    panel = figure.subplots()
    ends = [float(pairs.min()), float(pairs.max())]
    panel.plot(ends, ends, color="#b0b0b0", lw=1, zorder=0)
    panel.scatter(pairs[:, 0], pairs[:, 1], s=22, color="#1f5fa8", alpha=0.75, linewidths=0)
    panel.set(xlabel=f"{target}, true", ylabel=f"{target}, predicted")
    panel.set_title(title, fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    save_figure(path, figure)


def draw_confusion(
    path: Path, pairs: npt.NDArray[np.int64], classes: Sequence[str], target: str, title: str
) -> None:
    """Confusion matrix of slides, (classes, classes)."""
    side = max(4.0, 1.8 + 0.62 * len(classes))
    figure = new_figure(side, side, _DPI)
    panel = figure.subplots()
    draw_pairs(panel, pairs, classes)
    panel.set(xlabel=f"{target}, predicted", ylabel=f"{target}, true")
    panel.set_title(title, fontsize=10)
    save_figure(path, figure)


def draw_tiles(
    path: Path,
    rows: Sequence[Sequence[tuple[str, npt.NDArray[np.uint8] | None]]],
) -> None:
    """Draw tiles with captions, a query and its neighbours in each row."""
    columns = max(map(len, rows))
    figure = new_figure(1.7 * columns, 2.15 * len(rows), _DPI)
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
                panel.text(0.5, 0.5, "no picture", ha="center", va="center", fontsize=8)
    save_figure(path, figure)


def _colours(numbers: Any) -> npt.NDArray[np.float64]:
    """Colours of clusters as in GeoJSON, (n, 3) between 0 and 1."""
    known = {int(k): np.array(colour_of(int(k))) / 255 for k in np.unique(numbers)}
    return np.array([known[int(k)] for k in numbers]).reshape(-1, 3)


def _grid(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, math.ceil(math.sqrt(count)) + 1)
    rows = math.ceil(count / columns)
    figure = new_figure(max(5.0, _SIDE * columns), _SIDE * rows + 0.8, _DPI)
    panels = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for panel in panels[count:]:
        panel.axis("off")
    return figure, panels[:count]
