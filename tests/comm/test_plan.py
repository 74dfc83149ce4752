from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.comm.boxed import owners_of
from spatialdl.comm.plan import MessageSizes, Piece, Plan
from spatialdl.layout.layout import Box, Layout, empty_box

SIZE = (2, 7, 6)


@st.composite
def cut_points(draw, size, parts):
    return (0, *sorted(draw(st.integers(0, size)) for _ in range(parts - 1)), size)


@st.composite
def needs(draw):
    if draw(st.integers(0, 9)) == 0:
        return empty_box(2)
    batch, rows, cols = (
        sorted((draw(st.integers(low, high)), draw(st.integers(low, high))))
        for low, high in ((0, SIZE[0]), (-3, SIZE[1] + 3), (-3, SIZE[2] + 3))
    )
    return Box(map(tuple, (batch, rows, cols)))


@st.composite
def exchanges(draw):
    """Disjoint boxes owned, which together are the image, in any order; any boxes needed."""
    samples, rows, cols = (
        draw(cut_points(size, draw(st.integers(1, most))))
        for size, most in zip(SIZE, (2, 3, 2), strict=True)
    )
    owned = draw(st.permutations(Layout(samples, (rows, cols)).boxes))
    needed = [draw(needs()) for _ in owned]
    return tuple(owned), tuple(needed)


def pixels(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(*interval) for interval in box)))


@given(exchanges())
def test_every_pixel_moves_from_its_owner_to_all_who_need_it(exchange):
    """Each rank finds out its part by itself: what one sends the other receives."""
    image = pixels(Box(((0, SIZE[0]), (0, SIZE[1]), (0, SIZE[2]))))
    everyone = [Plan(*exchange, rank) for rank in range(len(exchange[0]))]
    sent = {(p.rank, piece.peer): piece.box for p in everyone for piece in p.sends}
    received = {(piece.peer, p.rank): piece.box for p in everyone for piece in p.receives}
    assert sent == received
    assert all(source != target for source, target in sent)
    assert not any(box.is_empty for box in sent.values())
    for plan in everyone:
        own, need, kept = pixels(plan.own), pixels(plan.need), pixels(plan.kept)
        arriving = Counter(kept)
        for piece in plan.receives:
            arriving.update(pixels(piece.box))
            assert pixels(piece.box) <= pixels(plan.owned[piece.peer])
        assert set(arriving) == need & image
        assert set(arriving.values()) <= {1}
        assert kept <= own
        unowned = {pixel for box in plan.unowned for pixel in pixels(box)}
        assert need - image <= unowned <= need
        assert {pixel for box in plan.unneeded for pixel in pixels(box)} == own - need
        assert {(int(i), int(j)) for i, j in zip(*plan.links.nonzero(), strict=True)} == {*sent}
        assert plan.communicates == bool(sent)
        assert (plan.graph, plan.describe()) == (everyone[0].graph, everyone[0].describe())


def test_where_boxes_owned_leave_a_hole_all_that_is_needed_counts_as_nobodys():
    owned = [Box(((0, 1), (0, 2), (0, 6))), Box(((0, 1), (4, 8), (0, 6)))]
    needed = [Box(((0, 1), (0, 8), (0, 6)))] * 2
    assert Plan(owned, needed, 0).unowned == (needed[0],)


def test_messages_are_waited_for_by_ranks_that_have_none():
    """All ranks take part in the exchange, so that it has one number on all of them."""
    nothing = MessageSizes({}, {})
    assert (nothing.sends, nothing.receives, nothing.communicates) == ((), (), True)
    assert MessageSizes({0: 1}, {}).communicates


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
