"""Drawn slides whose class is in two of their tiles."""

from __future__ import annotations

import numpy as np
import pytest

from spatialdl.data.rare_tiles import KINDS, MARKED, RareTilesBag, draw_tile


def test_slides_are_the_same_each_time_and_differ_by_seed() -> None:
    one, again, other = (RareTilesBag("s", 1, 6, 32, (0, 0, n)) for n in (3, 3, 4))
    np.testing.assert_array_equal(one.read(), again.read())
    np.testing.assert_array_equal(one.read(2, 4), one.read()[2:4])
    assert one.read().shape == (6, one.width)
    assert not np.array_equal(one.read(), other.read())


def test_two_tiles_show_the_class_and_the_others_are_alike_in_both() -> None:
    cross, ring = (RareTilesBag("s", kind, 9, 32, (0, 0, 1)) for kind in (0, 1))
    differs = (cross.read() != ring.read()).any(1)
    assert len(cross.marked) == MARKED
    assert np.flatnonzero(differs).tolist() == cross.marked.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_mark_is_dark(kind: str) -> None:
    with_mark, without = (draw_tile(np.random.default_rng(1), 32, one) for one in (kind, None))
    assert (with_mark < 150).sum() > (without < 150).sum() + 60


def test_slides_without_room_for_marks_are_refused() -> None:
    for tiles, side in ((1, 32), (16, 8)):
        with pytest.raises(ValueError, match="at least 2 tiles of at least 24 pixels"):
            RareTilesBag("s", 0, tiles, side, (0,))
