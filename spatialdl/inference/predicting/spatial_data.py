"""The maps, polygons and predictions of a slide as one SpatialData store, NAME.zarr.

images/slide          a picture of the slide
images/probability    the overview map of each shown class, NaN where nothing was predicted
labels/classes        1 + the most probable class, 0 where there is none; only if places have one
                      class
shapes/tiles          or shapes/regions: the polygons of NAME.geojson
tables/predictions    their classes and probabilities

Each element has the coordinate systems ``global``, level-0 pixels of the slide, and, if the
slide's resolution is known, ``microns``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from spatialdl.common.files import fsync_folder
from spatialdl.slides.reading.reader import Thumbnail

PIXELS, MICRONS = "global", "microns"
"""Coordinate systems."""
TABLE = "predictions"


def need_spatialdata() -> None:
    """Check that spatialdata is installed, without the slow import.

    Raises:
        ValueError: it is not installed.
    """
    if find_spec("spatialdata") is None:
        raise ValueError(
            "spatialdata=true needs spatialdata: pip install 'spatialdl[spatialdata]', or leave it "
            "out"
        )


@dataclass(frozen=True)
class SlideMaps:
    """The contents of a store, for one slide.

    Attributes:
        name: name of the slide.
        mpp: micrometres per level-0 pixel, if known.
        thumbnail: thumbnail of the slide, if it is available.
        maps: (rows, columns) by name of the shown class, NaN where nothing was predicted.
        scale: level-0 pixels per pixel of the maps.
        kind: kind of the polygons, "tiles" or "regions".
        features: the polygons, as in GeoJSON.
        classes: all class names, if a place has one class and all maps are present; else empty.
    """

    name: str
    mpp: float | None
    thumbnail: Thumbnail | None
    maps: Mapping[str, npt.NDArray[Any]]
    scale: float
    kind: str
    features: Sequence[Mapping[str, Any]]
    classes: Sequence[str] = ()


def save_spatial_data(path: Path, given: SlideMaps) -> None:
    """Write a store atomically, replacing an existing one.

    Raises:
        OSError: the store cannot be written.
    """
    from spatialdata import SpatialData

    elements: dict[str, Any] = {"probability": _probability(given)}
    if given.thumbnail is not None:
        elements["slide"] = _picture(given.thumbnail, given.mpp)
    if given.classes:
        elements["classes"] = _class_map(given)
    if given.features:
        elements[given.kind] = _shapes(given)
        elements[TABLE] = _table(given)
    attrs = {"slide": given.name, "mpp": given.mpp, "classes": [*given.classes] or [*given.maps]}
    temporary = path.with_name(f".{uuid4().hex}.tmp")
    try:
        SpatialData.init_from_elements(elements, attrs=attrs).write(temporary)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
        fsync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _transformations(scale: float, mpp: float | None) -> dict[str, Any]:
    """Transformations of an element whose pixels span `scale` level-0 pixels."""
    from spatialdata.transformations import Scale

    scales = {PIXELS: scale} | ({} if mpp is None else {MICRONS: scale * mpp})
    return {name: Scale([one, one], axes=("x", "y")) for name, one in scales.items()}


def _picture(thumbnail: Thumbnail, mpp: float | None) -> Any:
    from spatialdata.models import Image2DModel

    return Image2DModel.parse(
        np.ascontiguousarray(thumbnail.image.transpose(2, 0, 1)),
        dims=("c", "y", "x"),
        c_coords=["r", "g", "b"],
        transformations=_transformations(thumbnail.scale, mpp),
    )


def _probability(given: SlideMaps) -> Any:
    from spatialdata.models import Image2DModel

    return Image2DModel.parse(
        np.stack([*given.maps.values()]).astype(np.float32),
        dims=("c", "y", "x"),
        c_coords=[*given.maps],
        transformations=_transformations(given.scale, given.mpp),
    )


def _class_map(given: SlideMaps) -> Any:
    from spatialdata.models import Labels2DModel

    maps = np.stack([given.maps[name] for name in given.classes])
    known = np.isfinite(maps).all(0)
    best = np.where(known, 1 + np.where(known, maps, 0).argmax(0), 0)
    transformations = _transformations(given.scale, given.mpp)
    return Labels2DModel.parse(
        best.astype(np.int32), dims=("y", "x"), transformations=transformations
    )


def _shapes(given: SlideMaps) -> Any:
    from geopandas import GeoDataFrame
    from spatialdata.models import ShapesModel

    features = [{**one, "properties": {"class": _class_of(one)}} for one in given.features]
    return ShapesModel.parse(
        GeoDataFrame.from_features(features), transformations=_transformations(1.0, given.mpp)
    )


def _table(given: SlideMaps) -> Any:
    from anndata import AnnData
    from spatialdata.models import TableModel

    found = [one["properties"]["measurements"] for one in given.features]
    values = [[row.get(f"probability {name}", np.nan) for name in given.maps] for row in found]
    table = AnnData(np.array(values, np.float64))
    table.var_names = [*given.maps]
    table.obs["class"] = [_class_of(one) for one in given.features]
    table.obs["class"] = table.obs["class"].astype("category")
    table.obs["region"] = given.kind
    table.obs["region"] = table.obs["region"].astype("category")
    table.obs["instance_id"] = np.arange(len(found))
    return TableModel.parse(
        table, region=given.kind, region_key="region", instance_key="instance_id"
    )


def _class_of(feature: Mapping[str, Any]) -> str:
    return str(feature["properties"].get("classification", {"name": ""})["name"])
