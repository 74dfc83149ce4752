"""Pictures of all commands on trained networks, in one style: colours, legends, axes.

A class, group or cluster has the same colour in each picture and in GeoJSON; quantities over slides
have the colours of heat maps.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spatialdl.common.files import replacing
from spatialdl.common.text import fitted
from spatialdl.slides.finding.tissue import find_tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAT_COLOURS, HEAT_OPACITY = "turbo", 0.65
"""Colour map and opacity of heat maps over pictures."""
MOST = 8
"""Number of classes drawn at most."""
TITLE, SMALL = 10, 8
"""Font sizes of titles, and of legends and labels."""
_LISTED, _NAME = 24, 28  # entries of a legend, and characters of each
_THUMBNAIL = 1600  # longer side of a slide's thumbnail, in pixels
_PANEL_INCHES, _MOST_INCHES = 4.6, 7.0
_DPI = 130
_GOLDEN = (5**0.5 - 1) / 2

# --- style


def faint(image: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Convert an image to light grey (rows, columns), so that overlaid colours stay true."""
    return np.asarray(255 - (255 - image.mean(2)) * 0.6)


def colour_of(number: int) -> list[int]:
    """RGB colour of a class, 0 to 255; consecutive classes differ clearly in hue."""
    parts = colorsys.hsv_to_rgb((0.6 + number * _GOLDEN) % 1, 0.75, 0.9)
    return [round(255 * part) for part in parts]


def colours_of(numbers: Any) -> npt.NDArray[np.float64]:
    """Colours of classes for Matplotlib, (n, 3) between 0 and 1."""
    known = {int(k): np.array(colour_of(int(k))) / 255 for k in np.unique(numbers)}
    return np.array([known[int(k)] for k in numbers]).reshape(-1, 3)


def new_figure(width: float, height: float) -> Figure:
    """A figure of a size in inches, which needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def new_panels(panels: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of at least `panels` panels of a size in inches, without axes."""
    columns = min(panels, columns)
    rows = ceil(panels / columns)
    figure = new_figure(max(4.0, width * columns + 0.9), height * rows + 0.5)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in axes:
        panel.set_axis_off()
    return figure, axes


def save_figure(path: Path, figure: Figure) -> None:
    """Write a figure as PNG, atomically."""
    with replacing(path) as out:
        figure.savefig(out, format="png")


def style_axes(panel: Axes, x: str, y: str, grid: Any = "both") -> None:
    """Label the axes of a diagram, and draw a grid."""
    panel.set(xlabel=x, ylabel=y, axisbelow=True)
    panel.grid(axis=grid, color="0.92")
    panel.spines[["top", "right"]].set_visible(False)


def add_legend(figure: Figure, colours: Mapping[str, Any], title: str = "") -> None:
    """Draw a legend of colours by name below the panels."""
    from matplotlib.patches import Patch

    shown = list(colours.items())[:_LISTED]
    marks = [Patch(color=colour, label=fitted(name, _NAME)) for name, colour in shown]
    if len(colours) > len(shown):
        title = f"{title} (the first {len(shown)} of {len(colours)})".strip()
    if marks:
        figure.legend(
            handles=marks,
            title=title or None,
            fontsize=SMALL,
            loc="outside lower center",
            ncols=min(6, len(marks)),
            frameon=False,
        )


def add_heat_bar(
    figure: Figure,
    panels: Sequence[Axes],
    what: str,
    limits: tuple[float, float] = (0.0, 1.0),
    opacity: float = HEAT_OPACITY,
) -> None:
    """Draw the scale of heat maps.

    Args:
        what: the quantity and its unit.
        limits: values of the first and the last colour.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    characters = max(14, int(10 * figure.get_figheight()))  # that fit beside flat slides
    scale = ScalarMappable(Normalize(*limits), HEAT_COLOURS)
    bar = figure.colorbar(scale, ax=list(panels), shrink=0.8, alpha=opacity)
    bar.set_label(fill(what, characters), fontsize=SMALL + 1)


# --- diagrams and maps


def draw_confusion(
    panel: Axes, pairs: npt.NDArray[Any], classes: Sequence[str], target: str = ""
) -> None:
    """Draw a confusion matrix (classes, classes), by true and predicted class.

    Args:
        target: what the classes are of.
    """
    shares = pairs / np.maximum(pairs.sum(1, keepdims=True), 1)
    panel.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(pairs):
        colour = "white" if shares[row, column] > 0.55 else "black"
        text = f"{_short(count)}\n{100 * shares[row, column]:.0f} %"
        panel.text(column, row, text, ha="center", va="center", color=colour, fontsize=SMALL)
    names = [fitted(name, _NAME) for name in classes]
    if len(set(names)) < len(names):
        names = [f"{k}: {fitted(name, _NAME - 4)}" for k, name in enumerate(classes)]
    panel.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=SMALL)
    panel.set_yticks(range(len(names)), names, fontsize=SMALL)
    before = f"{target}, " if target else ""
    panel.set(xlabel=f"{before}predicted", ylabel=f"{before}true (%: of its row)")


def confusion_side(classes: int) -> float:
    """Width and height in inches of a readable confusion matrix."""
    return max(4.0, 1.8 + 0.62 * classes)


def draw_numbers(
    panel: Axes, truth: npt.NDArray[Any], predicted: npt.NDArray[Any], number: int = 0
) -> None:
    """Draw predicted numbers over true ones; NaN is left out.

    Args:
        number: index of the target, which has a colour.
    """
    panel.scatter(truth, predicted, s=14, alpha=0.6, color=colours_of([number]), lw=0)
    ends = float(np.nanmin(truth)), float(np.nanmax(truth))
    panel.plot(ends, ends, color="0.5", lw=1, ls="--", label="predicted = true")
    panel.legend(fontsize=SMALL, loc="lower right", framealpha=0.85)


def _short(count: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return f"{count / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{count:,.0f}"


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
    high = min(_MOST_INCHES, max(1.2, _PANEL_INCHES * extent[0] / extent[1]))
    figure, axes = new_panels(panels, 2 if panels == 4 else 3, _PANEL_INCHES, high + 0.35)
    place = grey = None
    if thumbnail is not None:
        height, width = (thumbnail.scale * length for length in thumbnail.missing.shape)
        place = (0, width, height, 0)  # the last pixels may end beyond the slide
        grey = faint(thumbnail.image)
        axes[0].imshow(thumbnail.image, extent=place)
        axes[0].set_title("slide", fontsize=TITLE)
        axes[0].set(xlim=(0, extent[1]), ylim=(extent[0], 0))
    for panel, (name, values) in zip(axes[panels - len(drawn) :], drawn.items(), strict=False):
        if grey is not None:
            panel.imshow(grey, extent=place, cmap="gray", vmin=0, vmax=255)
        panel.imshow(
            np.ma.masked_invalid(values),
            extent=(0, values.shape[1] * scale, values.shape[0] * scale, 0),
            cmap=HEAT_COLOURS,
            vmin=limits[0],
            vmax=limits[1],
            alpha=HEAT_OPACITY if grey is not None else 1.0,
            interpolation="nearest",
        )
        panel.set_title(f"class {name}" if name.isdigit() else fitted(name, 40), fontsize=TITLE)
        panel.set(xlim=(0, extent[1]), ylim=(extent[0], 0))
    add_heat_bar(figure, axes, what, limits, HEAT_OPACITY if grey is not None else 1.0)
    hidden = len(maps) - len(drawn)
    more = f" (and {hidden} more classes)" if hidden else ""
    figure.suptitle(f"{fitted(title, 60)}{more}", fontsize=TITLE + 1)
    save_figure(path, figure)


def slide_thumbnail(slide: Slide) -> Thumbnail:
    """A thumbnail of the slide, contrast-stretched if it is dark."""
    found = slide.thumbnail(max(1.0, max(slide.size) / _THUMBNAIL))
    return found._replace(image=find_tissue(found).shown(found.image))
