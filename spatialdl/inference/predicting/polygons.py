"""Polygons of a slide: as GeoJSON for QuPath, and with its maps as a SpatialData store.

GeoJSON has tiles, regions by class, regions of strong activation. Coordinates are level-0 pixels
of the scanned part of the slide.
Properties are those of QuPath since 0.4: ``objectType``, ``classification`` with a name and a
colour, and ``measurements`` by name.

A store, NAME.zarr, has the maps, polygons and predictions.

images/slide          a picture of the slide
images/probability    the overview map of each shown class, NaN where nothing was predicted
labels/classes        1 + the most probable class, 0 where there is none; only if places have one
                      class
shapes/tiles          or shapes/regions: the polygons of NAME.geojson
tables/predictions    their classes and probabilities

Each element has the coordinate systems ``global``, level-0 pixels of the scanned part of the
slide, and, if its resolution is known, ``microns``.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from scipy import ndimage
from skimage.measure import approximate_polygon, find_contours

from spatialdl.common.files import fsync_folder, replacing
from spatialdl.inference.predicting.pictures import colour_of
from spatialdl.slides.reading.reader import Thumbnail

PIXELS, MICRONS = "global", "microns"
"""Coordinate systems."""
TABLE = "predictions"
_SPECK = 4  # pixels of an overview; smaller regions are noise


def save_geojson(path: Path, features: Iterable[Mapping[str, Any]]) -> None:
    """Write a feature collection atomically, with one feature in memory at a time.

    Args:
        path: path of the file, compressed if it ends in `.gz`.
    """
    with replacing(path) as file, _compressed(file, path) as out:
        out.write(b'{"type": "FeatureCollection", "features": [')
        for number, feature in enumerate(features):
            out.write(b",\n" if number else b"\n")
            out.write(json.dumps(feature, allow_nan=False).encode())
        out.write(b"\n]}\n")


def _compressed(file: BinaryIO, path: Path) -> AbstractContextManager[Any]:
    if path.suffix != ".gz":
        return nullcontext(file)
    return gzip.GzipFile(path.stem, "wb", fileobj=file, mtime=0)  # reproducible bytes


def tile_features(
    places: npt.NDArray[np.int64],
    span: tuple[float, float],
    extent: tuple[int, int],
    values: npt.NDArray[np.float64],
    classes: Sequence[str],
    *,
    one_class: bool,
) -> Iterator[dict[str, Any]]:
    """A box per tile, with the probability of every class.

    Args:
        extent: level-0 rows and columns of the slide, to which boxes are clipped.
        one_class: classify a tile by its most probable class; otherwise by all classes above 0.5.
    """
    height, width = span
    for (x, y), row in zip(places.tolist(), values, strict=True):
        right, bottom = min(x + width, extent[1]), min(y + height, extent[0])
        chosen = [int(row.argmax())] if one_class else np.flatnonzero(row > 0.5).tolist()
        measured = {f"probability {name}": float(row[k]) for k, name in enumerate(classes)}
        yield _feature("tile", box_of(x, y, right, bottom), chosen, classes, measured)


def class_features(
    places: npt.NDArray[np.int64],
    span: float,
    numbers: npt.NDArray[Any],
    classes: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """A box per tile, of a class each.

    Args:
        span: side of a tile, in level-0 pixels.
        numbers: (N,), indices of classes.
    """
    side = round(span)
    for (x, y), number in zip(places.tolist(), numbers.tolist(), strict=True):
        yield _feature("tile", box_of(x, y, x + side, y + side), [number], classes, {})


def box_of(x: float, y: float, right: float, bottom: float) -> dict[str, Any]:
    """The geometry of a box."""
    ring = [(x, y), (right, y), (right, bottom), (x, bottom), (x, y)]
    return {"type": "Polygon", "coordinates": [ring]}


def region_features(
    means: npt.NDArray[np.float64], scale: float, classes: Sequence[str], shown: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Regions in which one class is the most probable, with its mean probability.

    Args:
        means: (classes, rows, columns), NaN where nothing was predicted.
        scale: level-0 pixels per pixel.
        shown: indices of the classes to include.
    """
    known = np.isfinite(means).all(0)
    best = np.where(known, np.where(known, means, 0).argmax(0), -1)
    for number in shown:
        yield from _regions(best == number, means[number], scale, classes, number, "probability")


def active_features(
    means: Mapping[int, npt.NDArray[np.float64]], scale: float, classes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Regions in which the activation of a class exceeds half of the maximum, with its mean.

    Args:
        means: (rows, columns) by shown class, NaN where nothing was predicted.
        scale: level-0 pixels per pixel.
    """
    known = {number: np.nan_to_num(one, nan=0.0) for number, one in means.items()}
    half = max((float(one.max()) for one in known.values()), default=0.0) / 2
    for number, one in known.items():
        if half > 0:
            yield from _regions(one > half, one, scale, classes, number, "activation")


def _regions(
    inside: npt.NDArray[np.bool_],
    values: npt.NDArray[np.float64],
    scale: float,
    classes: Sequence[str],
    number: int,
    what: str,
) -> Iterator[dict[str, Any]]:
    """Connected regions of a class, each with its mean value."""
    pieces, _ = ndimage.label(inside)
    for piece, place in enumerate(ndimage.find_objects(pieces), 1):
        mask = pieces[place] == piece
        if mask.sum() < _SPECK:
            continue
        rings = _rings(mask, place[0].start, place[1].start, scale)
        measured = {f"{what} {classes[number]}": float(values[place][mask].mean())}
        geometry = {"type": "Polygon", "coordinates": rings}
        yield _feature("annotation", geometry, [number], classes, measured)


def _rings(
    mask: npt.NDArray[np.bool_], row: int, col: int, scale: float
) -> list[list[tuple[float, float]]]:
    """The outline of a region, then of its holes, as rings of (x, y)."""
    # padding closes all contours; pixels are squares around their centres
    contours = find_contours(np.pad(mask, 1).astype(np.float64), 0.5)  # type: ignore[no-untyped-call]
    lines = [approximate_polygon(line, 0.5) for line in contours]  # type: ignore[no-untyped-call]
    lines = [line for line in lines if len(line) > 3]
    lines.sort(key=lambda line: -_area(line))
    at = np.array([row - 0.5, col - 0.5])
    return [[(float(x), float(y)) for y, x in (line + at) * scale] for line in lines]


def _area(line: npt.NDArray[np.float64]) -> float:
    y, x = line[:, 0], line[:, 1]
    return abs(float((x[:-1] * y[1:] - x[1:] * y[:-1]).sum())) / 2


def _feature(
    kind: str,
    geometry: dict[str, Any],
    chosen: Sequence[int],
    classes: Sequence[str],
    measured: Mapping[str, float],
) -> dict[str, Any]:
    properties: dict[str, Any] = {"objectType": kind, "measurements": dict(measured)}
    if chosen:
        name = ": ".join(classes[number] for number in chosen)  # QuPath's derived classes
        properties["classification"] = {"name": name, "color": colour_of(chosen[0])}
    return {"type": "Feature", "geometry": geometry, "properties": properties}


# --- SpatialData stores


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
