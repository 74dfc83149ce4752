"""A picture of a slide with maps drawn over it."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spatialdl.data.saving import replacing
from spatialdl.slides.finding.tissue import find_tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail
from spatialdl.text import fitted
from spatialdl.training.pictures.heat_maps import COLOURS, OPACITY, faint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 8
"""Number of classes drawn at most."""
_THUMBNAIL = 1600  # longer side of a slide's thumbnail, in pixels
_PANEL_INCHES, _MOST_INCHES = 4.6, 7.0


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
        axes[0].set_xlim(0, extent[1])
        axes[0].set_ylim(extent[0], 0)
    image = None
    for panel, (name, values) in zip(axes[panels - len(drawn) :], drawn.items(), strict=False):
        if grey is not None:
            panel.imshow(grey, extent=place, cmap="gray", vmin=0, vmax=255)
        image = panel.imshow(
            np.ma.masked_invalid(values),
            extent=(0, values.shape[1] * scale, values.shape[0] * scale, 0),
            cmap=COLOURS,
            vmin=limits[0],
            vmax=limits[1],
            alpha=OPACITY if grey is not None else 1.0,
            interpolation="nearest",
        )
        panel.set_title(f"class {name}" if name.isdigit() else fitted(name, 40), fontsize=10)
        panel.set_xlim(0, extent[1])
        panel.set_ylim(extent[0], 0)
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
