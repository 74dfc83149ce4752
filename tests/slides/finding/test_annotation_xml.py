from __future__ import annotations

import numpy as np
import pytest

from spatialdl.slides.finding.annotation_xml import read_xml

ASAP = b"""<?xml version="1.0"?>
<ASAP_Annotations>
  <Annotations>
    <Annotation Name="Annotation 0" Type="Polygon" PartOfGroup="Tumor" Color="#F4FA58">
      <Coordinates>
        <Coordinate Order="0" X="10.5" Y="20" /><Coordinate Order="2" X="40" Y="50" />
        <Coordinate Order="1" X="40" Y="20" />
      </Coordinates>
    </Annotation>
    <Annotation Name="Annotation 1" Type="Dot" PartOfGroup="Tumor" Color="#F4FA58">
      <Coordinates><Coordinate Order="0" X="1" Y="2" /></Coordinates>
    </Annotation>
    <Annotation Name="Annotation 2" Type="Rectangle" PartOfGroup="None" Color="#F4FA58">
      <Coordinates>
        <Coordinate Order="0" X="0" Y="0" /><Coordinate Order="1" X="9" Y="0" />
        <Coordinate Order="2" X="9" Y="9" /><Coordinate Order="3" X="0" Y="9" />
      </Coordinates>
    </Annotation>
  </Annotations>
  <AnnotationGroups><Group Name="Tumor" PartOfGroup="None" Color="#64FE2E"/></AnnotationGroups>
</ASAP_Annotations>"""

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


def test_asap() -> None:
    regions, others = read_xml(ASAP)
    assert [region.label for region in regions] == ["Tumor", None]
    assert regions[0].outline.tolist() == [[10.5, 20], [40, 20], [40, 50]]
    assert regions[1].area == 81
    assert others == 1


def test_aperio() -> None:
    outline, hole = [(0, 0), (100, 0), (100, 50), (0, 50)], [(10, 10), (20, 10), (20, 20)]
    arrow = (3, 0, [(0, 0), (5, 5)])
    regions, others = read_xml(aperio((0, 0, outline), (0, 1, hole), (1, 0, outline), arrow))
    assert [region.label for region in regions] == ["Tumor", "Tumor"]
    assert [region.area for region in regions] == [5000, 5000]
    assert [len(region.holes) for region in regions] == [1, 1]
    assert regions[0].holes[0].tolist() == [list(map(float, corner)) for corner in hole]
    assert others == 1
    assert read_xml(aperio((0, 0, outline), name=""))[0][0].label == "Stroma"


def test_aperio_shapes_given_by_two_corners() -> None:
    corners = [(100, 60), (0, 20)]
    (box, ellipse), _ = read_xml(aperio((1, 0, corners), (2, 0, corners)))
    assert box.area == 4000
    assert ellipse.area == pytest.approx(np.pi * 50 * 20, rel=1e-3)
    assert ellipse.outline.mean(0).tolist() == pytest.approx([50, 40])


def test_layers_keep_their_holes_to_themselves() -> None:
    outline, hole = [(0, 0), (9, 0), (9, 9)], [(1, 1), (2, 1), (2, 2)]
    one, two = aperio((0, 0, outline)), aperio((0, 0, outline), (0, 1, hole), name="b")
    both = one.replace(b"</Annotations>", b"") + two[two.index(b"<Annotation ") :]
    regions, _ = read_xml(both)
    assert [(region.label, len(region.holes)) for region in regions] == [("Tumor", 0), ("b", 1)]


BOMB = b"""<?xml version="1.0"?>
<!DOCTYPE lolz [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<Annotations>&b;</Annotations>"""


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><Annotations/>',
        b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><Annotations>&x;</Annotations>',
    ],
)
def test_a_document_type_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="it has a document type"):
        read_xml(text)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(KeyError, match="Type"):
        read_xml(ASAP.replace(b'Type="Polygon"', b""))
    with pytest.raises(KeyError, match="X"):
        read_xml(ASAP.replace(b'X="40"', b"", 1))
    with pytest.raises(ValueError, match="could not convert"):
        read_xml(ASAP.replace(b'X="40"', b'X="forty"', 1))
    with pytest.raises(ValueError, match="is not XML"):
        read_xml(b"\x00\x01")
