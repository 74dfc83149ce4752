"""Reader of the annotation XML of ASAP and Aperio ImageScope."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree as ET

import numpy as np

from spatialdl.slides.finding.regions import Region, Ring

_ASAP_REGIONS = ("Polygon", "Rectangle", "Spline")
_APERIO_POLYGON, _APERIO_RECTANGLE, _APERIO_ELLIPSE = "0", "1", "2"
_CORNERS_OF_ELLIPSE = 180


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
        regions.append(Region(_ring(corners), label=label))
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
    ring = _ring(region.iter("Vertex"))
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


def _ring(corners: Iterable[ET.Element]) -> Ring:
    points = [(float(corner.attrib["X"]), float(corner.attrib["Y"])) for corner in corners]
    return np.array(points, np.float64).reshape(-1, 2)
