"""Drawings of layouts in characters."""

from __future__ import annotations

import pytest

from spatialdl.layout.placement import Placement
from spatialdl.planning.layout_text import DRAWN, WIDEST, draw_layout

SP_PP = """
  stage 0: 2x2 tiles    stage 1: whole
  +---+---+             +---+
  | 0 | 1 |          -> | 4 |
  +---+---+             +---+
  | 2 | 3 |
  +---+---+
"""
GEMS = """
  stage 0: whole    stage 1: whole
  +------+          +------+
  | 0, 1 |       -> | 1, 0 |
  +------+          +------+
  of two ranks in a tile, the second holds it in the copy with inverse stage order
"""
DP_SP = """
  stage 0: 1x2 tiles
  +---+---+
  | 0 | 1 |
  +---+---+
  replica 1: same layout on ranks 2 to 3
"""
LOCAL_DP = """
  stage 0: 2x1 tiles    stage 1: 2 by samples
  +---+                 +---+
  | 0 |              -> | 2 |
  +---+                 +---+
  | 1 |                 | 3 |
  +---+                 +---+
"""

TENSOR = """
  stage 0: 2x1 tiles    stage 1: whole, 3 by channels
  +---+                 +-------+
  | 0 |              -> | 2+3+4 |
  +---+                 +-------+
  | 1 |
  +---+
  ranks joined by + share a tile and split its channels
"""


@pytest.mark.parametrize(
    ("placement", "picture"),
    [
        (Placement(1, ((1, 1),)), "\n  stage 0: whole\n  +---+\n  | 0 |\n  +---+\n"),
        (Placement(1, ((2, 2), (1, 1))), SP_PP),
        (Placement(1, ((1, 1), (1, 1)), mirrored=True), GEMS),
        (Placement(2, ((1, 2),)), DP_SP),
        (Placement(1, ((2, 1), (1, 1)), batch=(1, 2)), LOCAL_DP),
        (Placement(1, ((2, 1), (1, 1)), tensor=(1, 3)), TENSOR),
    ],
)
def test_layouts(placement, picture):
    assert draw_layout(placement) == picture.strip("\n").splitlines()


@pytest.mark.parametrize(
    "placement",
    [
        Placement(1, ((8, 8),)),
        Placement(4, ((4, 2), (4, 1), (4, 1))),
        Placement(8, ((1, 1),) * 8, interleave=2),
        Placement(1, ((100, 100), (1, 1)), mirrored=True),
        Placement(1, ((1, 1),), tensor=(64,)),
    ],
)
def test_many_ranks_are_summarised(placement):
    lines = draw_layout(placement)
    assert max(map(len, lines)) <= WIDEST
    assert len(lines) <= 2 * DRAWN + 10


def test_a_large_grid_has_its_corners():
    cells = "|".join(draw_layout(Placement(1, ((8, 9),)))).split("|")
    assert {"0", "8", "63", "71", "..."} <= {cell.strip() for cell in cells}


def test_replicas_are_told_by_their_ranks():
    assert draw_layout(Placement(4, ((2, 1),)))[-1] == (
        "  replicas 1 to 3: same layout on ranks 2 to 7, 2 each"
    )
    dealt = Placement(2, ((2, 1),), order=(0, 2, 1, 3))
    assert draw_layout(dealt)[-1] == "  replica 1: same layout on ranks 1, 3"
    assert "  | 2 |" in draw_layout(dealt)
