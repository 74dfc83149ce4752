"""What tiles count for the prediction of their slide: heat maps, written.

NAME-attention.png   the slide, and over it the attention, as the share of tiles that have less
NAME-attention.tif   1 + 254 x that share over the whole slide; 0 where there is no tile
NAME.geojson         a box a tile, with its attention, for QuPath
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from spatialdl.data.bags import PlacedBag
from spatialdl.predicting.geojson import save_geojson
from spatialdl.predicting.overlay import save_overlay
from spatialdl.predicting.results import PICTURE, Overview, as_bytes
from spatialdl.predicting.tile_map import TileMap
from spatialdl.slides.batch.finding_slides import storable
from spatialdl.slides.finding.tissue import find_tissue
from spatialdl.slides.pyramid import TILE, write_pyramid
from spatialdl.slides.reading.reader import Slide, Thumbnail

_ROWS = 2 * TILE  # of a band
_STRONG = 0.9
"""Share of tiles with less attention from which on a tile is marked."""
_MARK = [220, 40, 40]


@dataclass(frozen=True)
class BagPlaces:
    """Where the tiles of a bag lie.

    Attributes:
        places: int64 (tiles, 2), level-0 x and y.
        span: level-0 pixels of a tile's side.
        extent: level-0 rows and columns of the slide.
    """

    places: npt.NDArray[np.int64]
    span: float
    extent: tuple[int, int]

    @classmethod
    def of(cls, file: PlacedBag, size: tuple[int, int] | None) -> BagPlaces:
        """Those of a feature file.

        Args:
            size: level-0 rows and columns of the slide, if it is there.

        Raises:
            ValueError: it has no positions, or they do not say how large tiles are.
        """
        places = file.coords()
        span = tile_span(file.attributes, places)
        if span is None:
            raise ValueError(
                f"{file.path} does not say how large its tiles are (patch_size_level0, or "
                "patch_size and downsample): their heat map cannot be drawn"
            )
        if size is None:
            rows, cols = (_whole(file.attributes, f"level0_{side}") for side in ("height", "width"))
            right, bottom = (places.max(0) + np.ceil(span)).tolist()
            size = max(int(bottom), rows or 0), max(int(right), cols or 0)
        return cls(places, span, size)


def tile_span(attributes: Mapping[str, Any], places: npt.NDArray[np.int64]) -> float | None:
    """Level-0 pixels of a tile's side; None where nothing tells.

    TRIDENT has `patch_size_level0`, CLAM the side and the downsampling of a level; of tiles side by
    side the smallest distance tells.
    """
    given = _whole(attributes, "patch_size_level0")
    if given:
        return float(given)
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
    """(tiles,): the share of the other tiles that have less attention, ties in the middle."""
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
        slide: open, if it is there; drawn under the map.
        what: the title of the map, such as the class it is of.

    Returns:
        Names of the files.
    """
    stem, shares = storable(name), shares_below(attention)
    span = places.span, places.span
    found = TileMap(places.places, span, places.extent, shares[:, None, None, None])
    overview = Overview(found.size)
    said = {"what": "share of tiles with less attention", "value_at_1": 0.0, "value_at_255": 1.0}
    mpp = None if slide is None else slide.known_mpp
    write_pyramid(
        folder / f"{stem}-attention.tif",
        (as_bytes(band, (0.0, 1.0)) for band in overview.seen(found.bands(0, _ROWS))),
        found.size,
        None if mpp is None else mpp * found.scale,
        grey=True,
        empty=True,
        description=json.dumps({**said, "not_examined": 0}),
    )
    save_overlay(
        folder / f"{stem}-attention.png",
        name,
        {what: overview.means},
        found.scale * overview.factor,
        places.extent,
        None if slide is None else _thumbnail(slide),
        "share of tiles with less attention",
        (0.0, 1.0),
    )
    save_geojson(folder / f"{stem}.geojson", _features(places, attention, shares))
    return [f"{stem}{ending}" for ending in ("-attention.tif", "-attention.png", ".geojson")]


def _thumbnail(slide: Slide) -> Thumbnail:
    found = slide.thumbnail(max(1.0, max(slide.size) / PICTURE))
    return found._replace(image=find_tissue(found).shown(found.image))


def _features(
    places: BagPlaces, attention: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]
) -> Iterator[dict[str, Any]]:
    """Boxes of tiles; those with the most attention are marked."""
    rows, cols = places.extent
    for (x, y), value, share in zip(places.places.tolist(), attention, shares, strict=True):
        right, bottom = min(x + places.span, cols), min(y + places.span, rows)
        ring = [(x, y), (right, y), (right, bottom), (x, bottom), (x, y)]
        properties: dict[str, Any] = {
            "objectType": "tile",
            "measurements": {"attention": float(value), "attention share": float(share)},
        }
        if share >= _STRONG:
            properties["classification"] = {"name": "strong attention", "color": _MARK}
        geometry = {"type": "Polygon", "coordinates": [ring]}
        yield {"type": "Feature", "geometry": geometry, "properties": properties}
