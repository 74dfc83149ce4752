from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spatialdl.errors import SlideError
from spatialdl.slides.finding.annotations import find_annotations, read_annotations

OUTER = [[0, 0], [100, 0], [100, 80], [0, 80], [0, 0]]
HOLE = [[10, 10], [20, 10], [20, 20], [10, 10]]


def written(folder: Path, content: object, name: str = "a.geojson") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def feature(kind: str, coordinates: object, **properties: object) -> dict[str, Any]:
    geometry = {"type": kind, "coordinates": coordinates}
    return {
        "type": "Feature",
        "id": "PathAnnotationObject",
        "geometry": geometry,
        "properties": properties,
    }


def collection(*features: dict[str, Any]) -> dict[str, Any]:
    return {"type": "FeatureCollection", "features": list(features)}


def test_polygons_of_qupath(tmp_path: Path) -> None:
    named = {"name": "Tumor", "color": [200, 0, 0]}
    content = collection(
        feature("Polygon", [OUTER, HOLE], objectType="annotation", classification=named),
        feature("MultiPolygon", [[OUTER], [HOLE]], classification={"names": ["Tumor", "Positive"]}),
        feature("Polygon", [OUTER], objectType="annotation"),
        feature("Point", [5, 5], objectType="annotation"),
        feature("Polygon", [OUTER], objectType="cell", classification=named),
        feature("LineString", [[0, 0], [5, 5]], objectType="annotation"),
    )
    regions = read_annotations(written(tmp_path, content))
    labels = ["Tumor", "Tumor: Positive", "Tumor: Positive", None]
    assert [region.label for region in regions] == labels
    assert [len(region.holes) for region in regions] == [1, 0, 0, 0]
    assert (regions[0].outline == np.array(OUTER)).all()
    assert (regions[0].holes[0] == np.array(HOLE)).all()
    assert [region.area for region in regions] == [8000, 8000, 50, 8000]


def test_other_ways_to_write_geojson(tmp_path: Path) -> None:
    one = feature("Polygon", [[[*corner, 0.0] for corner in OUTER]], classification="Tumor")
    group = {
        "type": "Feature",
        "geometry": {"type": "GeometryCollection", "geometries": [one["geometry"]]},
    }
    for content in (one, [one], collection(one), collection(group)):
        for start in ("", "\ufeff"):
            path = written(tmp_path, start + json.dumps(content))
            assert [region.area for region in read_annotations(path)] == [8000]


def test_no_annotation_at_all_is_no_region(tmp_path: Path) -> None:
    for name, content in [
        ("a.geojson", collection()),
        ("a.json", []),
        ("a.xml", "<ASAP_Annotations><Annotations/></ASAP_Annotations>"),
        ("b.xml", "<Annotations/>"),
    ]:
        assert read_annotations(written(tmp_path, content, name)) == []


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", "", "Expecting value"),
        ("a.json", '{"type": "FeatureCollection", "features": [', "Expecting value"),
        ("a.json", "{}", "it is not a GeoJSON FeatureCollection; its type is None"),
        ("a.json", "3", "it is not a GeoJSON"),
        ("a.json", '{"type": "FeatureCollection"}', "'features' is missing"),
        ("a.json", "[[1]]", "'[1]' is not a GeoJSON Feature"),
        (
            "a.json",
            [feature("Polygon", [[[0, 0], [1, 1]]])],
            "the shape (2, 2), expected 3 corners",
        ),
        ("a.json", [feature("Polygon", [[[0, 0], [1, 1], [2]]])], "inhomogeneous"),
        ("a.json", [feature("Polygon", [[["x", 0], [1, 1], [2, 2]]])], "could not convert"),
        ("a.json", [feature("Polygon", [OUTER, []])], "the shape (0,), expected 3 corners"),
        ("a.json", [feature("Polygon", [[[0, 0], [float("nan"), 1], [2, 2]]])], "is not finite"),
        (
            "a.json",
            [feature("Polygon", [[[0, 0], [1e300, 1], [2, 2]]])],
            "a corner of a polygon is not finite",
        ),
        (
            "a.json",
            [feature("Point", [1, 2])],
            "have no region, only 1 points, lines or detections",
        ),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.xml", "", "it is not XML: no element found"),
        ("a.xml", "<Annotations><Annotation>", "it is not XML: no element found"),
        ("a.xml", "<html/>", "its first element is <html>"),
    ],
)
def test_what_is_malformed_is_refused(
    tmp_path: Path, name: str, content: object, says: str
) -> None:
    path = written(tmp_path, content, name)
    with pytest.raises(SlideError) as caught:
        read_annotations(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SlideError, match="can't decode"):
        read_annotations(tmp_path / "a.json")


def test_annotations_are_found_by_the_slides_name(tmp_path: Path) -> None:
    (tmp_path / "slides").mkdir()
    slide = tmp_path / "slides" / "ä b.svs"
    slide.touch()
    with pytest.raises(SlideError, match=r"ä b.svs has no annotations: there is no ä b.geojson in"):
        find_annotations(tmp_path, slide)
    for name in ("ä b.xml", "ä b.GEOJSON", "ä b.svs.json"):
        path = written(tmp_path, "", name)
        assert find_annotations(tmp_path, slide) == path
        path.unlink()
    written(tmp_path, "", "ä b.xml")
    written(tmp_path, "", "ä b.json")
    with pytest.raises(SlideError, match=r"more than one annotations in .*: ä b.json and ä b.xml"):
        find_annotations(tmp_path, slide)
