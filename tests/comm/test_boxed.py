from __future__ import annotations

import pytest

from spatialdl.comm.boxed import owners_of
from spatialdl.comm.plan import Piece
from spatialdl.parallel.layout import Box

WHOLE, PART, CORNER = (
    Box(((0, 1), (0, 8), (0, 8))),
    Box(((0, 1), (2, 4), (0, 8))),
    Box(((0, 1), (2, 4), (0, 2))),
)


def test_a_piece_lies_in_the_first_box_that_contains_it():
    pieces = (Piece(0, CORNER), Piece(1, PART), Piece(2, WHOLE))
    assert owners_of(pieces, (PART, WHOLE)) == (0, 0, 1)


@pytest.mark.parametrize("boxes", [(PART, PART, PART), (WHOLE, PART, CORNER)])
def test_a_box_for_each_piece_is_its_own_even_if_boxes_overlap(boxes):
    """The parts that several ranks add to the same pixels must not land on each other."""
    assert owners_of(tuple(Piece(n, box) for n, box in enumerate(boxes)), boxes) == (0, 1, 2)


def test_a_piece_that_no_tensor_holds_is_told():
    with pytest.raises(RuntimeError, match="no tensor holds"):
        owners_of((Piece(0, WHOLE),), (PART, CORNER))
