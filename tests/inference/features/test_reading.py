"""Every slide is claimed once; reading ahead keeps the order, propagates errors, and stops."""

from __future__ import annotations

import pickle
import threading
from io import BytesIO
from typing import Any

import numpy as np
import pytest

from spatialdl.inference.features.encoding import Read, ReadAhead
from spatialdl.inference.features.sources import SlideTiles
from spatialdl.inference.features.workers import new_claims
from spatialdl.slides.batch.record import PartRecord
from spatialdl.slides.batch.report import TilingReport


class Numbers(SlideTiles):
    """A slide whose tiles contain their indices; tile `bad` is unreadable."""

    def __init__(self, name: str, count: int, bad: int = -1) -> None:
        super().__init__(name, "", TilingReport(name), {}, 600)
        self._count, self._bad = count, bad

    @property
    def count(self) -> int:
        return self._count

    def _open(self) -> BytesIO:
        return BytesIO()

    def _read(self, opened: BytesIO, tiles: slice, part: PartRecord) -> list[Any]:
        assert not opened.closed
        if tiles.start <= self._bad < tiles.stop:
            raise OSError("bad")
        return list(np.arange(tiles.start, tiles.stop, dtype=np.uint8))


def described(one: Any) -> Any:
    if isinstance(one, TilingReport):
        return one.slide
    what = str(one.problem) if one.problem else one.piece and one.piece.tiles.tolist()
    return one.bag.name, what


@pytest.mark.parametrize("threads", [1, 4])
def test_pieces_come_in_order_and_errors_with_their_slide(threads):
    opened = iter(
        [Numbers("a", 9), TilingReport("none"), Numbers("b", 20, bad=8), Numbers("c", 0), None]
    )
    with ReadAhead(lambda: next(opened), threads) as reading:
        found = [described(one) for one in reading]
    step = Numbers("a", 9).pieces()[0][1]
    assert step == 7
    assert found == [
        *(("a", [*range(7)]), ("a", [7, 8]), ("a", None), "none"),
        *(("b", [*range(7)]), ("b", "bad"), ("b", [*range(14, 20)]), ("b", None), ("c", None)),
    ]


def test_it_ends_when_it_is_left_early():
    before = threading.enumerate()  # those of other tests may end meanwhile
    with ReadAhead(lambda: Numbers("endless", 1000), 2) as reading:
        assert isinstance(next(iter(reading)), Read)
    assert [one for one in threading.enumerate() if one not in before] == []


def test_errors_of_opening_are_raised():
    def broken() -> None:
        raise RuntimeError("no slides any more")

    with pytest.raises(RuntimeError, match="no slides"), ReadAhead(broken, 1) as reading:
        list(reading)


def test_workers_take_every_slide_once(tmp_path):
    first = new_claims(tmp_path, 5)
    second = pickle.loads(pickle.dumps(first))
    assert [first.take(), second.take(), second.take(), first.take()] == [0, 1, 2, 3]
    assert (second.take(), first.take(), second.take()) == (4, None, None)
    assert first.taken() == 5
    (tmp_path / ".claims-left").mkdir()
    new_claims(tmp_path, 1).remove()
    assert list(tmp_path.iterdir()) == []
