"""Attention heat maps of slides predicted as bags of tiles.

NAME-attention.png   the slide, and the attention over it, as the share of tiles with less
NAME-attention.tif   1 + 254 x that share over the whole slide; 0 outside tiles
NAME.geojson         a box per tile, with its attention, for QuPath
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from spatialdl.common.files import storable
from spatialdl.data.bags import PlacedBag
from spatialdl.inference.predicting.geojson import box_of, save_geojson
from spatialdl.inference.predicting.pictures import (
    Overview,
    TileMap,
    save_class_map,
    save_overlay,
    slide_thumbnail,
)
from spatialdl.slides.reading.reader import Slide

_STRONG = 0.9
"""Least share of tiles with less attention for a tile to be marked."""
_MARK = [220, 40, 40]


@dataclass(frozen=True)
class BagPlaces:
    """The positions of a bag's tiles.

    Attributes:
        places: int64 (tiles, 2), level-0 x and y.
        span: side of a tile, in level-0 pixels.
        extent: level-0 rows and columns of the slide.
    """

    places: npt.NDArray[np.int64]
    span: float
    extent: tuple[int, int]

    @classmethod
    def of(cls, file: PlacedBag, size: tuple[int, int] | None) -> BagPlaces:
        """Read the positions of a feature file.

        Args:
            size: level-0 rows and columns of the slide, if it is available.

        Raises:
            ValueError: the file has no positions, or the size of its tiles is unknown.
        """
        places = file.coords()
        span = tile_span(file.attributes, places)
        if span is None:
            raise ValueError(
                f"{file.path} does not record the size of its tiles (patch_size_level0, or "
                "patch_size and downsample): no heat map can be drawn"
            )
        if size is None:
            rows, cols = (_whole(file.attributes, f"level0_{side}") for side in ("height", "width"))
            right, bottom = (places.max(0) + np.ceil(span)).tolist()
            size = max(int(bottom), rows or 0), max(int(right), cols or 0)
        return cls(places, span, size)


def tile_span(attributes: Mapping[str, Any], places: npt.NDArray[np.int64]) -> float | None:
    """The side of a tile in level-0 pixels; None if unknown.

    TRIDENT records `patch_size_level0`, CLAM the side and the downsampling of a level. Otherwise it
    is the smallest distance of neighbours.
    """
    level0_side = _whole(attributes, "patch_size_level0")
    if level0_side:
        return float(level0_side)
    side, down = _whole(attributes, "patch_size"), attributes.get("downsample")
    if side and down is not None and attributes.get("patch_level", 0) != 0:
        return float(side * np.ravel(down)[0])
    if side and attributes.get("patch_level") == 0:
        return float(side)
    gaps = [np.diff(np.unique(column)) for column in places.T]
    least = [int(gap.min()) for gap in gaps if len(gap)]
    return float(min(least)) if least else (float(side) if side else None)


def _whole(attributes: Mapping[str, Any], name: str) -> int | None:
    value = attributes.get(name)
    if not isinstance(value, int | float | np.integer | np.floating):
        return None
    return int(value) if np.isfinite(value) and value >= 1 else None


def shares_below(attention: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """(tiles,): share of the other tiles with less attention; ties count half."""
    if len(attention) == 1:
        return np.ones(1)
    ranks = rankdata(attention, method="average") - 1
    return np.asarray(ranks / (len(attention) - 1), np.float64)


def save_bag_maps(
    folder: Path,
    name: str,
    attention: npt.NDArray[np.float64],
    places: BagPlaces,
    slide: Slide | None,
    what: str,
) -> list[str]:
    """Write the heat map of a slide.

    Args:
        attention: (tiles,), of any range.
        slide: the open slide, drawn under the map; None if it is not available.
        what: title of the map, such as "attention for CLASS".

    Returns:
        Names of the files.
    """
    stem, shares = storable(name), shares_below(attention)
    span = places.span, places.span
    found = TileMap(places.places, span, places.extent, shares[:, None, None, None])
    label = "share of tiles with less attention"
    mpp = None if slide is None or slide.known_mpp is None else slide.known_mpp * found.scale
    path = folder / f"{stem}-attention.tif"
    overview = save_class_map(path, found, 0, (0.0, 1.0), mpp, {"what": label})
    save_overlay(
        folder / f"{stem}-attention.png",
        name,
        {what: overview},
        found.scale * Overview(found.size).factor,
        places.extent,
        None if slide is None else slide_thumbnail(slide),
        label,
        (0.0, 1.0),
    )
    save_geojson(folder / f"{stem}.geojson", _features(places, attention, shares))
    return [f"{stem}{ending}" for ending in ("-attention.tif", "-attention.png", ".geojson")]


def _features(
    places: BagPlaces, attention: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]
) -> Iterator[dict[str, Any]]:
    """GeoJSON boxes of tiles; tiles with the most attention are classified as such."""
    rows, cols = places.extent
    for (x, y), value, share in zip(places.places.tolist(), attention, shares, strict=True):
        right, bottom = min(x + places.span, cols), min(y + places.span, rows)
        properties: dict[str, Any] = {
            "objectType": "tile",
            "measurements": {"attention": float(value), "attention share": float(share)},
        }
        if share >= _STRONG:
            properties["classification"] = {"name": "strong attention", "color": _MARK}
        geometry = box_of(x, y, right, bottom)
        yield {"type": "Feature", "geometry": geometry, "properties": properties}
