"""Annotations of slides: GeoJSON of QuPath, XML of ASAP and Aperio ImageScope.

Annotated regions are polygons, which are rasterised to maps and masks of their classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt

from spatialdl.data.format import UNLABELLED
from spatialdl.errors import SlideError
from spatialdl.slides.reading.paths import find_beside

SUFFIXES = (".geojson", ".json", ".xml")
_FARTHEST = 1e8  # largest plausible coordinate, in level-0 pixels
_ASAP_REGIONS = ("Polygon", "Rectangle", "Spline")
_APERIO_POLYGON, _APERIO_RECTANGLE, _APERIO_ELLIPSE = "0", "1", "2"
_CORNERS_OF_ELLIPSE = 180
_IN_QUPATH = ("annotation", None)  # object types of regions; cells, detections, tiles are not


def find_annotations(folder: Path, slide: Path) -> Path:
    """Find the annotations of `a.svs`: `a.geojson` or `a.svs.geojson` (also .json, .xml).

    Raises:
        SlideError: there is no such file, or more than one.
    """
    return find_beside(folder, slide, SUFFIXES, "annotations")


def read_annotations(path: Path) -> list[Region]:
    """Read the regions of an annotation file.

    GeoJSON: polygons and multipolygons with holes, in level-0 pixels, classes from
    `properties.classification.name` (QuPath). ASAP XML: polygons, rectangles and splines,
    classes from the group. Aperio XML: polygons, rectangles and ellipses, classes from the
    layer's name, regions drawn with the negative pen as holes. Points, lines and QuPath's
    detections are ignored.

    Returns:
        The regions; empty if the file has no annotations.

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
            f"annotations {path} have no region, only {others} points, lines or detections; "
            "draw polygons"
        )
    return regions


def counts_from_scanned_part(path: Path) -> bool:
    """Whether coordinates are relative to the scanned part of a slide, as in QuPath's files.

    QuPath shows and exports only the part within the bounds of MIRAX slides; see its issues 820
    and 1278.
    """
    return path.suffix.lower() != ".xml"


def _check(ring: Ring) -> None:
    if ring.ndim != 2 or ring.shape[1] != 2 or len(ring) < 3:
        raise ValueError(f"a polygon has the shape {ring.shape}, expected 3 corners or more")
    if not (np.abs(ring) < _FARTHEST).all():  # false for NaN, too
        raise ValueError(f"a corner of a polygon is not finite or beyond {_FARTHEST:g} pixels")


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
    """Features of a collection, of a plain list (older QuPath), or a single feature."""
    kind = content.get("type") if isinstance(content, dict) else None
    if kind == "FeatureCollection":
        content = content["features"]
    elif kind == "Feature":
        content = [content]
    if not isinstance(content, list):
        raise ValueError(f"it is not a GeoJSON FeatureCollection; its type is {kind!r}")
    for feature in content:
        if not isinstance(feature, dict) or feature.get("type") != "Feature":
            raise ValueError(f"{str(feature)[:40]!r} is not a GeoJSON Feature")
    return content


def _polygons(geometry: Mapping[str, Any]) -> Iterator[Any]:
    """Polygons of a geometry, each a list of rings: the outline, then the holes."""
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


def read_xml(text: bytes) -> tuple[list[Region], int]:
    """Read the regions of an annotation file, and count its annotations that are not regions.

    Raises:
        ValueError: not XML, neither of the two formats, or with a document type, whose entities
            could expand to fill the memory.
        KeyError: an attribute is missing.
    """
    parser = ET.XMLParser(target=_Builder())
    try:
        root = ET.fromstring(text, parser)
    except ET.ParseError as error:
        raise ValueError(f"it is not XML: {error}") from error
    if root.tag == "ASAP_Annotations":
        return _asap(root)
    if root.tag == "Annotations":
        return _aperio(root)
    raise ValueError(
        f"its first element is <{root.tag}>, expected <ASAP_Annotations> (ASAP) or "
        "<Annotations> (Aperio)"
    )


class _Builder(ET.TreeBuilder):
    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError(f"it has a document type ({name}), which is not allowed")


def _asap(root: ET.Element) -> tuple[list[Region], int]:
    regions: list[Region] = []
    others = 0
    for annotation in root.iter("Annotation"):
        if annotation.attrib["Type"] not in _ASAP_REGIONS:
            others += 1
            continue
        group = annotation.get("PartOfGroup", "None").strip()
        corners = sorted(annotation.iter("Coordinate"), key=lambda c: float(c.attrib["Order"]))
        label = None if group in ("None", "") else group
        regions.append(Region(_xml_ring(corners), label=label))
    return regions, others


def _aperio(root: ET.Element) -> tuple[list[Region], int]:
    regions: list[Region] = []
    others = 0
    for layer in root.iter("Annotation"):
        outlines: list[Ring] = []
        holes: list[Ring] = []
        for region in layer.iter("Region"):
            ring = _aperio_ring(region)
            if ring is None:
                others += 1
            elif region.get("NegativeROA", "0") == "1":
                holes.append(ring)
            else:
                outlines.append(ring)
        label = _aperio_label(layer)
        regions += [Region(outline, tuple(holes), label) for outline in outlines]
    return regions, others


def _aperio_ring(region: ET.Element) -> Ring | None:
    """The outline of a region; None for arrows, rulers and other marks."""
    kind = region.get("Type", _APERIO_POLYGON)
    ring = _xml_ring(region.iter("Vertex"))
    if kind in (_APERIO_RECTANGLE, _APERIO_ELLIPSE):  # given by two corners, or all four
        low, high = ring.min(0), ring.max(0)
        if kind == _APERIO_RECTANGLE and len(ring) > 2:
            return ring
        if kind == _APERIO_RECTANGLE:
            return np.array([low, (high[0], low[1]), high, (low[0], high[1])])
        angle = np.linspace(0, 2 * np.pi, _CORNERS_OF_ELLIPSE, endpoint=False)
        circle = np.stack([np.cos(angle), np.sin(angle)], 1)
        return np.asarray((low + high) / 2 + (high - low) / 2 * circle)
    return ring if kind == _APERIO_POLYGON else None


def _aperio_label(layer: ET.Element) -> str | None:
    """The layer's name; without one, its description."""
    name = layer.get("Name", "").strip()
    if not name:
        for attribute in layer.findall("./Attributes/Attribute"):
            if attribute.get("Name") == "Description":
                name = attribute.get("Value", "").strip()
    return name or None


def _xml_ring(corners: Iterable[ET.Element]) -> Ring:
    points = [(float(corner.attrib["X"]), float(corner.attrib["Y"])) for corner in corners]
    return np.array(points, np.float64).reshape(-1, 2)


Ring = npt.NDArray[np.float64]  # (corners, 2): level-0 x, y; the last is joined to the first
Mask = npt.NDArray[np.bool_]

_CROSSINGS = 2**20  # intersections of edges and rows computed at a time
NOTHING = 0  # value of a class map in no region
BACKGROUND = "background"


@dataclass(frozen=True, eq=False)
class Region:
    """An annotated polygon: its outline, its holes, and its class, if any."""

    outline: Ring
    holes: tuple[Ring, ...] = ()
    label: str | None = None

    @property
    def area(self) -> float:
        """Area of the outline, in level-0 pixels."""
        x, y = self.outline.T
        return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)

    def moved(self, by: tuple[float, float]) -> Region:
        """Return the region moved by level-0 x, y."""
        return Region(self.outline + by, tuple(hole + by for hole in self.holes), self.label)


def class_names(regions: Sequence[Region]) -> list[str | None]:
    """Return the classes of regions, sorted by name; None, for no class, comes first."""
    names: set[str | None] = {region.label for region in regions}
    return sorted(names, key=lambda name: (name is not None, name or ""))


def class_map(
    regions: Sequence[Region], shape: tuple[int, int], scale: float
) -> npt.NDArray[np.uint16]:
    """Rasterise regions: for each pixel 1 + the index of its class in `class_names`, or 0.

    A pixel belongs to a region that contains its centre. Of overlapping regions the smallest
    wins: regions inside of a larger one are more specific.

    Args:
        regions: in level-0 pixels; clipped to the slide.
        shape: rows and columns of the map.
        scale: level-0 pixels per pixel of the map.
    """
    names = class_names(regions)
    classes = np.full(shape, NOTHING, np.uint16)
    for region in sorted(regions, key=lambda region: -region.area):
        # only its bounding box: there may be thousands of regions
        first = np.clip(np.floor(region.outline.min(0) / scale), 0, shape[::-1]).astype(int)
        last = np.clip(np.ceil(region.outline.max(0) / scale), 0, shape[::-1]).astype(int)
        part = classes[first[1] : last[1], first[0] : last[0]]
        inside = filled(region.outline / scale - first, part.shape)
        for hole in region.holes:
            inside &= ~filled(hole / scale - first, part.shape)
        part[inside] = names.index(region.label) + 1
    return classes


def filled(ring: Ring, shape: tuple[int, ...]) -> Mask:
    """Fill a polygon: pixels with centres inside, by the even-odd rule.

    In each row that it crosses, an edge flips all pixels right of the crossing.
    """
    rows, cols = shape
    # pixel centres become integers
    x0, y0 = ring.T - 0.5
    x1, y1 = np.roll(x0, -1), np.roll(y0, -1)
    # an edge covers rows [upper end, lower end), so that corners count once
    first = np.clip(np.ceil(np.minimum(y0, y1)), 0, rows).astype(np.int64)
    last = np.clip(np.ceil(np.maximum(y0, y1)), 0, rows).astype(np.int64)
    flips = np.zeros(rows * (cols + 1), np.int64)
    # in groups of edges, to limit the memory
    for some in _shares(last - first):
        counts = (last - first)[some]
        edge = np.repeat(np.arange(len(ring))[some], counts)
        row = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts) + first[edge]
        across = (x1 - x0)[edge] * ((row - y0[edge]) / (y1 - y0)[edge])
        col = np.clip(np.ceil(x0[edge] + across), 0, cols).astype(np.int64)
        flips += np.bincount(row * (cols + 1) + col, minlength=rows * (cols + 1))
    inside = flips.reshape(rows, cols + 1)[:, :cols].cumsum(1) % 2
    return np.asarray(inside, bool)


def _shares(counts: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Slices of edges with at most `_CROSSINGS` row crossings each, or a single edge."""
    ends = counts.cumsum()
    begin = 0
    while begin < len(counts):
        before = ends[begin] - counts[begin]
        end = max(begin + 1, int(np.searchsorted(ends, before + _CROSSINGS, "right")))
        yield slice(begin, end)
        begin = end


def class_list(names: Iterable[str]) -> list[str]:
    """Return the classes of masks: background first, then the classes of regions, sorted."""
    return [BACKGROUND, *sorted({*names} - {BACKGROUND})]


class RegionMask:
    """A mask that is drawn by rows: `mask[row0:row1]`.

    A pixel belongs to the smallest region that contains its centre. In no region it is background;
    in a region without a class it is unlabelled.

    Args:
        regions: in level-0 pixels.
        classes: class names, see `class_list`; values are indices into them.
        corner: level-0 x, y of the top-left corner of the mask.
        size: rows and columns.
        scale: level-0 pixels per pixel.

    Raises:
        SlideError: there are more classes than values of a mask.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        classes: Sequence[str],
        corner: tuple[float, float],
        size: tuple[int, int],
        scale: float,
    ) -> None:
        if len(classes) > UNLABELLED:
            raise SlideError(
                f"the annotations have {len(classes)} classes, a mask supports {UNLABELLED}"
            )
        x, y = corner
        self._regions = [region.moved((-x, -y)) for region in regions]
        values = [
            UNLABELLED if name is None else classes.index(name) for name in class_names(regions)
        ]
        self._values = np.array([classes.index(BACKGROUND), *values], np.uint8)
        self.shape, self._scale = size, scale

    def __getitem__(self, rows: slice) -> npt.NDArray[np.uint8]:
        """Draw rows, uint8 (rows, columns)."""
        first, last, _ = rows.indices(self.shape[0])
        up = (0.0, -first * self._scale)
        moved = [region.moved(up) for region in self._regions]
        return self._values[class_map(moved, (last - first, self.shape[1]), self._scale)]
