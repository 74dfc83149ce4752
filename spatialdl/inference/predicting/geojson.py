"""Predictions as GeoJSON for QuPath: tiles, regions by class, regions of strong activation.

Coordinates are level-0 pixels. Properties are those of QuPath since 0.4: ``objectType``,
``classification`` with a name and a colour, and ``measurements`` by name.
"""

from __future__ import annotations

import colorsys
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from scipy import ndimage
from skimage.measure import approximate_polygon, find_contours

from spatialdl.common.files import replacing

_SPECK = 4  # pixels of an overview; smaller regions are noise
_GOLDEN = (5**0.5 - 1) / 2


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


def colour_of(number: int) -> list[int]:
    """RGB colour of a class, 0 to 255; consecutive classes differ clearly in hue."""
    parts = colorsys.hsv_to_rgb((0.6 + number * _GOLDEN) % 1, 0.75, 0.9)
    return [round(255 * part) for part in parts]
