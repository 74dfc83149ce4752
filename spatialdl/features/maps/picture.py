"""A picture of a map: the region, and its three principal components as RGB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.data.saving import replacing
from spatialdl.errors import SlideError
from spatialdl.features.maps.components import COUNT
from spatialdl.features.maps.regions import SlideRegion
from spatialdl.slides.reading.reader import Slide, Thumbnail
from spatialdl.text import fitted

LONGEST = 1600
"""Cells or pixels of a side at most; larger maps are subsampled."""
_PANEL_INCHES, _LEAST_INCHES = 6.0, 1.6
_LIMITS = (1, 99)  # percentiles of the darkest and the brightest colour

Colours = npt.NDArray[np.uint8]


def as_colours(components: npt.NDArray[Any]) -> Colours:
    """Colours uint8 (rows, columns, 3) of components (found, rows, columns).

    Each component is stretched between its percentiles; missing ones are grey.
    """
    found = np.full((*components.shape[1:], COUNT), 127, np.uint8)
    for number, values in enumerate(components[:COUNT]):
        low, high = np.percentile(values, _LIMITS)
        if high > low:
            share = np.clip((values - low) / (high - low), 0, 1)
            found[..., number] = np.rint(255 * share)
    return found


def save_picture(
    path: Path,
    region: SlideRegion,
    colours: Colours,
    parts: npt.NDArray[Any],
    slide_mpp: float | None,
) -> None:
    """Draw a region beside its map.

    Args:
        colours: colours of the map, uint8 (rows, columns, 3).
        parts: share of variance of each component.
        slide_mpp: micrometres per level-0 pixel, overrides the slide's metadata.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    height, width = region.size
    long = _PANEL_INCHES / max(height, width)
    wide, high = (max(_LEAST_INCHES, long * side) for side in (width, height))
    figure = Figure(figsize=(2 * wide + 0.6, high + 0.9), dpi=130, layout="constrained")
    axes = figure.subplots(1, 2)
    place = (0, width, height, 0)
    thumbnail = _thumbnail(region, slide_mpp)
    if thumbnail is not None:
        rows, columns = (thumbnail.scale * side for side in thumbnail.missing.shape)
        [(x, y)], scale = region.images.places, region.images.scale
        whole = (-x / scale, (columns - x) / scale, (rows - y) / scale, -y / scale)
        axes[0].imshow(thumbnail.image, extent=whole)
    axes[1].imshow(colours, extent=place, interpolation="nearest")
    named = zip(("red", "green", "blue"), parts, strict=False)
    shares = ", ".join(f"{colour} {part:.0%}" for colour, part in named)
    for panel, title in zip(
        axes, ("region", f"principal components ({shares} of variance)"), strict=True
    ):
        panel.set_axis_off()
        panel.set_xlim(0, width)
        panel.set_ylim(height, 0)
        panel.set_title(title, fontsize=9)
    figure.suptitle(fitted(region.name, int(14 * wide)), fontsize=10)
    with replacing(path) as out:
        figure.savefig(out, format="png")


def _thumbnail(region: SlideRegion, slide_mpp: float | None) -> Thumbnail | None:
    """Thumbnail of the slide, with about `LONGEST` pixels of the region; None if unreadable."""
    span = max(region.size) * region.images.scale
    try:
        with Slide(region.images.path, slide_mpp) as slide:
            return slide.thumbnail(max(1.0, span / LONGEST))
    except SlideError:  # the map is written without it
        return None
