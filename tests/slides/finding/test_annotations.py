"""Annotations of all programs become regions, and regions classes of pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skimage.draw import polygon2mask

from spatialdl.data.format import UNLABELLED
from spatialdl.errors import SlideError
from spatialdl.slides.finding.annotations import (
    Region,
    RegionMask,
    class_list,
    class_map,
    class_names,
    filled,
    find_annotations,
    read_annotations,
    read_xml,
)
from spatialdl.slides.finding.tissue import find_mask

OUTER = [[0, 0], [100, 0], [100, 80], [0, 80], [0, 0]]
HOLE = [[10, 10], [20, 10], [20, 20], [10, 10]]


def asap(name: str, kind: str, group: str, *corners: tuple[float, float]) -> str:
    points = "".join(
        f'<Coordinate Order="{order}" X="{x}" Y="{y}" />' for order, (x, y) in enumerate(corners)
    )
    return (
        f'<Annotation Name="{name}" Type="{kind}" PartOfGroup="{group}" Color="#F4FA58">'
        f"<Coordinates>{points}</Coordinates></Annotation>"
    )


SHAPES = [
    asap("Annotation 0", "Polygon", "Tumor", (10.5, 20), (40, 20), (40, 50)),
    asap("Annotation 1", "Dot", "Tumor", (1, 2)),
    asap("Annotation 2", "Rectangle", "None", (0, 0), (9, 0), (9, 9), (0, 9)),
]
ASAP = (
    f"<ASAP_Annotations><Annotations>{''.join(SHAPES)}</Annotations><AnnotationGroups>"
    '<Group Name="Tumor" PartOfGroup="None" Color="#64FE2E"/></AnnotationGroups></ASAP_Annotations>'
).encode()
REGION = '<Region Id="1" Type="{}" NegativeROA="{}"><Vertices>{}</Vertices></Region>'


def aperio(*regions: tuple[int, int, list[tuple[int, int]]], name: str = "Tumor") -> bytes:
    text = ""
    for kind, negative, corners in regions:
        vertices = "".join(f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in corners)
        text += REGION.format(kind, negative, vertices)
    attributes = '<Attributes><Attribute Name="Description" Id="0" Value="Stroma"/></Attributes>'
    return (
        f'<Annotations MicronsPerPixel="0.499"><Annotation Id="1" Name="{name}">{attributes}'
        f"<Regions><RegionAttributeHeaders/>{text}</Regions><Plots/></Annotation></Annotations>"
    ).encode()


def test_asap():
    swapped = ASAP.replace(b'"1" X="40" Y="20"', b'"2" X="40" Y="50"', 1)
    swapped = swapped.replace(b'"2" X="40" Y="50" /></C', b'"1" X="40" Y="20" /></C', 1)
    for text in (ASAP, swapped):  # their order is that of Order
        regions, others = read_xml(text)
        assert [region.label for region in regions] == ["Tumor", None]
        assert regions[0].outline.tolist() == [[10.5, 20], [40, 20], [40, 50]]
        assert regions[1].area == 81
        assert others == 1


def test_aperio():
    outline, hole = [(0, 0), (100, 0), (100, 50), (0, 50)], [(10, 10), (20, 10), (20, 20)]
    arrow = (3, 0, [(0, 0), (5, 5)])
    one = aperio((0, 0, outline), (0, 1, hole), (1, 0, outline), arrow)
    regions, others = read_xml(one)
    assert [region.label for region in regions] == ["Tumor", "Tumor"]
    assert [region.area for region in regions] == [5000, 5000]
    assert [len(region.holes) for region in regions] == [1, 1]
    assert regions[0].holes[0].tolist() == [list(map(float, corner)) for corner in hole]
    assert others == 1
    assert [r.label for r in read_xml(aperio((0, 0, outline), name=""))[0]] == ["Stroma"]
    # shapes given by two corners
    corners = [(100, 60), (0, 20)]
    (box, ellipse), _ = read_xml(aperio((1, 0, corners), (2, 0, corners)))
    assert box.area == 4000
    assert ellipse.area == pytest.approx(np.pi * 50 * 20, rel=1e-3)
    assert ellipse.outline.mean(0).tolist() == pytest.approx([50, 40])


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


def test_polygons_of_qupath(tmp_path):
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


def test_other_ways_to_write_geojson(tmp_path):
    one = feature("Polygon", [[[*corner, 0.0] for corner in OUTER]], classification="Tumor")
    parts = {"type": "GeometryCollection", "geometries": [one["geometry"]]}
    for content in (one, [one], collection({"type": "Feature", "geometry": parts})):
        for start in ("", "\ufeff"):
            path = written(tmp_path, start + json.dumps(content))
            assert [region.area for region in read_annotations(path)] == [8000]
    # no annotation at all is no region
    for name, content in [("a.geojson", collection()), ("b.xml", "<Annotations/>")]:
        assert read_annotations(written(tmp_path, content, name)) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "Expecting value"),
        ("{}", "it is not a GeoJSON FeatureCollection; its type is None"),
        ('{"type": "FeatureCollection"}', "'features' is missing"),
        ("[[1]]", "'[1]' is not a GeoJSON Feature"),
        ([[0, 0], [1, 1]], "the shape (2, 2), expected 3 corners"),
        ([["x", 0], [1, 1], [2, 2]], "could not convert"),
        ([[0, 0], [float("nan"), 1], [2, 2]], "a corner of a polygon is not finite"),
        ([feature("Point", [1, 2])], "have no region, only 1 points, lines or detections"),
        ("[" * 100_000, "nested too deeply"),
        ("<Annotations><Annotation>", "it is not XML: no element found"),
        ("<html/>", "its first element is <html>"),
        ('<!DOCTYPE x [<!ENTITY a "aa">]><Annotations>&a;</Annotations>', "has a document type"),
        (ASAP.replace(b'Type="Polygon"', b"").decode(), "'Type' is missing"),
    ],
)
def test_what_is_malformed_is_refused(tmp_path, content, says):
    if isinstance(content, list) and not (content and isinstance(content[0], dict)):
        content = [feature("Polygon", [content])]
    name = "a.xml" if str(content)[:1] == "<" else "a.json"
    path = written(tmp_path, content, name)
    with pytest.raises(SlideError) as caught:
        read_annotations(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_files_are_found_by_the_slides_name(tmp_path):
    slide, folder = tmp_path / "ä b.tif", tmp_path / "beside"
    slide.touch()
    folder.mkdir()
    (folder / "ä b.tif").symlink_to(slide)  # the slide is not its own mask
    for name in ("ä.png", "ä b.c.png", "xä b.png", "ä b.txt", "ä b.tif.txt"):
        (folder / name).touch()
    for find, kind, names in (
        (find_annotations, "annotations", ("ä b.xml", "ä b.GEOJSON", "ä b.tif.json")),
        (find_mask, "mask", ("ä b.TIFF", "ä b.tif.png", "ä b.PNG")),
    ):
        first = {"mask": "ä b.png", "annotations": "ä b.geojson"}[kind]
        with pytest.raises(SlideError, match=f"ä b.tif has no {kind}: there is no {first} in"):
            find(folder, slide)
        for name in names:
            (folder / name).touch()
            assert find(folder, slide) == folder / name
            (folder / name).unlink()
        for name in names[:2]:
            (folder / name).touch()
        with pytest.raises(SlideError, match=f"more than one {kind} in .*: .* and .*; keep"):
            find(folder, slide)


def square(x0: float, y0: float, side: float) -> np.ndarray:
    return np.array([(x0, y0), (x0 + side, y0), (x0 + side, y0 + side), (x0, y0 + side)], float)


@given(st.integers(3, 12), st.integers(0, 2**32 - 1))
def test_any_polygon_is_filled_as_by_scikit_image(corners, seed):
    random = np.random.default_rng(seed)
    ring = random.uniform(-15, 45, (corners, 2))  # crosses itself, leaves the picture
    expected = polygon2mask((30, 25), ring[:, ::-1] - 0.5)
    assert (filled(ring, (30, 25)) == expected).all()
    # triangles that meet share no pixel and leave none out
    triangles = ([(0, 0), (9, 0), (9, 9)], [(0, 0), (9, 9), (0, 9)])
    one, other = (filled(np.array(triangle), (9, 9)) for triangle in triangles)
    assert (one ^ other).all()


def test_the_smallest_region_counts_whatever_the_order():
    large = Region(square(0, 0, 100), (square(60, 70, 30),), "stroma")
    small = Region(square(20, 20, 20), label="tumour")
    none = Region(square(5, 5, 4))
    assert class_names([large, small, none, small]) == [None, "stroma", "tumour"]
    for regions in ([large, small, none], [none, small, large]):
        classes = class_map(regions, (50, 60), 2.0)
        expected = np.zeros((50, 60))
        expected[:, :50] = 2
        expected[10:20, 10:20] = 3
        expected[35:50, 30:45] = 0
        expected[2:4, 2:4] = 1
        assert (classes == expected).all()
    assert not class_map([], (3, 4), 1.0).any()


REGIONS = [
    Region(square(100, 60, 200), label="tumour"),
    Region(square(140, 100, 60), label="necrosis"),  # within the tumour
    Region(square(110, 70, 20)),
]
PLACES = [(95, 50), (250, 200), (150, 110), (120, 80)]
CLASSES = class_list({"tumour", "necrosis", "stroma"})


def test_rows_of_a_mask_are_the_same_however_many_are_asked_for():
    assert CLASSES == ["background", "necrosis", "stroma", "tumour"]
    mask = RegionMask(REGIONS, CLASSES, (90.0, 41.0), (150, 140), 1.7)
    rows = [mask[first : first + 17] for first in range(0, 150, 17)]
    assert np.array_equal(np.concatenate(rows), mask[0:150])
    at = [mask[0:150][int((y - 41) / 1.7), int((x - 90) / 1.7)] for x, y in PLACES]
    assert at == [0, 3, 1, UNLABELLED]
    # no region is background, and a class of that name is it
    assert class_list({"background", "b", "a"}) == ["background", "a", "b"]
    for regions in ([], [Region(square(0, 0, 9), label="background")]):
        assert not RegionMask(regions, ["background"], (0, 0), (4, 5), 1.0)[0:4].any()
    with pytest.raises(SlideError, match="have 256 classes, a mask supports 255"):
        RegionMask([], class_list(map(str, range(255))), (0, 0), (4, 5), 1.0)
