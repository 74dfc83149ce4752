from __future__ import annotations

from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from PIL import Image

from spatialdl.parallel.placement import Placement
from spatialdl.planning import drawing
from spatialdl.planning.drawing import draw_layout


def stage(size, *grids, number=0, **more):
    """The panel of a stage."""
    panel = Figure().subplots()
    drawing._draw_stage(panel, Placement(1, grids, **more), number, size)
    return panel


def texts(panel):
    return [text.get_text() for text in panel.texts]


def tiles(panel):
    return [
        (one.get_x(), one.get_y(), one.get_width(), one.get_height())
        for one in panel.patches
        if isinstance(one, Rectangle)
    ]


def test_the_tiles_of_an_image_have_their_ranks():
    panel = stage((5, 6), (2, 2), (1, 1))
    assert tiles(panel) == [(0, 0, 3, 2), (3, 0, 3, 2), (0, 2, 3, 3), (3, 2, 3, 3)]
    assert texts(panel) == ["0", "1", "2", "3"]
    assert texts(stage((5, 6), (2, 2), (1, 1), number=1)) == ["4"]
    assert texts(stage((5, 6), (2, 1), (2, 1), mirrored=True)) == ["0\n3", "1\n2"]


def test_a_tile_has_all_ranks_that_divide_its_channels():
    panel = stage((5, 6), (2, 1), (1, 1), tensor=(1, 3), number=1)
    assert texts(panel) == ["2+3+4"]
    panel = stage((5, 6), (2, 1), (2, 1), mirrored=True, tensor=(2, 2))
    assert texts(panel) == ["0+1\n6+7", "2+3\n4+5"]


def test_a_signal_is_a_bar():
    panel = stage((100,), (3,))
    assert tiles(panel) == [(0, 0, 33, 12), (33, 0, 33, 12), (66, 0, 34, 12)]
    assert texts(panel) == ["0", "1", "2"]


def test_virtual_tiles_are_dashed_lines_within_the_tiles_of_ranks():
    panel = stage((10, 8), (2, 1), stream=(2, 3))
    assert tiles(panel) == [(0, 0, 8, 5), (0, 5, 8, 5)]
    lines = [line.tolist() for one in panel.collections for line in one.get_segments()]
    assert lines == [
        *([[0, 2], [8, 2]], [[0, 7], [8, 7]]),  # that of the ranks is between them
        *([[2, 0], [2, 10]], [[5, 0], [5, 10]]),
    ]
    assert not [one for one in stage((10, 8), (2, 1)).collections if one.get_segments()]


def test_a_volume_is_pulled_apart_into_slabs():
    panel = stage((9, 8, 6), (2, 2, 3))
    first, second = texts(panel)[:7], texts(panel)[7:]
    assert first == [*"012345", "slices 0:4"]
    assert second == ["6", "7", "8", "9", "10", "11", "slices 4:9"]
    ours = tiles(panel)
    assert [one[1:] for one in ours[:6]] == [one[1:] for one in ours[6:]]
    assert min(one[0] for one in ours[6:]) > 6  # they do not overlap
    faces = [one.get_xy() for one in panel.patches if isinstance(one, Polygon)]
    assert len(faces) == 2 * (3 + 2)  # above and to the right
    widths = [face[:, 0].max() - face[:, 0].min() for face in (faces[3], faces[8])]
    assert widths == pytest.approx([0.4 * 4, 0.4 * 5])


@pytest.mark.parametrize(
    ("size", "grids", "wide"),
    [
        ((8, 6, 4), ((2, 1, 1), (1, 1, 1)), False),
        ((9,), ((2,), (1,)), True),
        ((8, 6), ((2, 1), (1, 1)), True),
    ],
)
def test_a_picture_of_all_stages_is_written(size, grids, wide, tmp_path):
    placement = Placement(1, grids)
    job = SimpleNamespace(
        image=(1, *size),
        bounds=lambda *_: [0, 1, 2],
        program=lambda _: SimpleNamespace(names=["encoder", "head"]),
    )
    prediction = SimpleNamespace(
        placement=placement, recompute="none", schedule=SimpleNamespace(microbatches=1)
    )
    draw_layout(SimpleNamespace(prediction=prediction), job, tmp_path / "layout.png")
    with Image.open(tmp_path / "layout.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5
        assert (picture.width > picture.height) is wide
