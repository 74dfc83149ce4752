"""Annotations of slides: GeoJSON of QuPath, XML of ASAP and of Aperio ImageScope."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spatialdl.errors import SlideError
from spatialdl.slides.finding.annotation_xml import read_xml
from spatialdl.slides.finding.beside import find_beside
from spatialdl.slides.finding.regions import Region, Ring

SUFFIXES = (".geojson", ".json", ".xml")
_FARTHEST = 1e8  # level-0 pixels; no slide is so large
_IN_QUPATH = ("annotation", None)  # object types; cells, detections and tiles limit nothing


def find_annotations(folder: Path, slide: Path) -> Path:
    """The annotations of a slide: `a.geojson` or `a.svs.geojson` (also .json, .xml) for `a.svs`.

    Raises:
        SlideError: there is none, or more than one.
    """
    return find_beside(folder, slide, SUFFIXES, "annotations")


def read_annotations(path: Path) -> list[Region]:
    """Read the regions of an annotation file.

    GeoJSON: polygons and multipolygons with holes, in level-0 pixels, classes from
    `properties.classification.name` (QuPath). ASAP XML: polygons, rectangles and splines,
    classes from the group. Aperio XML: polygons, rectangles and ellipses, classes from the
    layer's name, regions drawn with the negative pen as holes. Points, lines and QuPath's
    detections are passed over.

    Returns:
        The regions; none if the file has no annotation at all.

    Raises:
        SlideError: the file is malformed, or has annotations but no region among them.
    """
    try:
        text = path.read_bytes()
        regions, others = read_xml(text) if path.suffix.lower() == ".xml" else _geojson(text)
        for region in regions:
            for ring in (region.outline, *region.holes):
                _check(ring)
    except RecursionError:
        raise SlideError(f"cannot read annotations {path}: nested too deeply") from None
    except OSError as error:
        raise SlideError(f"cannot read annotations {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise SlideError(f"cannot read annotations {path}: {what}") from error
    if others and not regions:
        raise SlideError(
            f"annotations {path} have no region: {others} points, lines or detections only; "
            "draw polygons"
        )
    return regions


def counts_from_scanned_part(path: Path) -> bool:
    """Whether coordinates begin where the scanned part of a slide does, as QuPath's do.

    QuPath shows and exports only what lies in the bounds that MIRAX slides have; see its issues
    820 and 1278.
    """
    return path.suffix.lower() != ".xml"


def _check(ring: Ring) -> None:
    if ring.ndim != 2 or ring.shape[1] != 2 or len(ring) < 3:
        raise ValueError(f"a polygon has the shape {ring.shape}, expected 3 corners or more")
    if not (np.abs(ring) < _FARTHEST).all():  # false for what is not a number, too
        raise ValueError("a corner of a polygon is not a number of pixels")


def _geojson(text: bytes) -> tuple[list[Region], int]:
    regions: list[Region] = []
    others = 0
    for feature in _features(json.loads(text.decode("utf-8-sig"))):
        properties = feature.get("properties") or {}
        kind = properties.get("objectType", properties.get("object_type"))
        geometry = feature["geometry"]
        polygons = list(_polygons(geometry)) if kind in _IN_QUPATH and geometry else []
        others += not polygons
        label = _label(properties.get("classification"))
        for outline, *holes in polygons:
            regions.append(Region(_ring(outline), tuple(map(_ring, holes)), label))
    return regions, others


def _features(content: Any) -> list[dict[str, Any]]:
    """The features of a collection, of a plain list (older QuPath), or the one that is there."""
    kind = content.get("type") if isinstance(content, dict) else None
    if kind == "FeatureCollection":
        content = content["features"]
    elif kind == "Feature":
        content = [content]
    if not isinstance(content, list):
        raise ValueError(f"it is no GeoJSON FeatureCollection; its type is {kind!r}")
    for feature in content:
        if not isinstance(feature, dict) or feature.get("type") != "Feature":
            raise ValueError(f"{str(feature)[:40]!r} is no GeoJSON Feature")
    return content


def _polygons(geometry: Mapping[str, Any]) -> Iterator[Any]:
    """The polygons of a geometry, each a list of rings: the outline, then the holes."""
    if geometry["type"] == "Polygon":
        yield from [geometry["coordinates"]] if geometry["coordinates"] else []
    elif geometry["type"] == "MultiPolygon":
        yield from geometry["coordinates"]
    elif geometry["type"] == "GeometryCollection":
        for part in geometry["geometries"]:
            yield from _polygons(part)


def _ring(corners: Any) -> Ring:
    return np.array([corner[:2] for corner in corners], np.float64)


def _label(classification: Any) -> str | None:
    """QuPath's class; derived classes have several names."""
    if isinstance(classification, dict):
        names = classification.get("names") or [classification.get("name")]
        classification = ": ".join(str(name) for name in names if name)
    return str(classification).strip() or None if classification else None
