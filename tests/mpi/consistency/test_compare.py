"""Ranks that differ, in any groups, all say the same."""

from __future__ import annotations

import pytest

from spatialdl.consistency import compare
from spatialdl.consistency.compare import check_alike
from spatialdl.consistency.rank_state import RankState


def subjects(**items: str) -> dict[str, RankState]:
    return {"code": RankState(items, "install the same", "/opt"), "data": RankState({}, "copy it")}


@pytest.fixture
def hosts(world, monkeypatch):
    monkeypatch.setattr(compare.socket, "gethostname", lambda: f"node{world.rank // 2}")


def said(world, own: dict[str, RankState]) -> str:
    with pytest.raises(ValueError, match="ranks differ: ") as found:
        check_alike(world, own)
    texts = world.allgather(str(found.value))
    assert texts == [texts[0]] * world.size
    return texts[0].removeprefix("ranks differ: ")


@pytest.mark.world(2, 3, 4)
def test_ranks_that_are_alike_may_start(world):
    check_alike(world, subjects(a="1"))


@pytest.mark.world(3, 4)
def test_the_last_rank_differs(world, hosts):
    last = world.size - 1
    text = said(world, subjects(a="1", b="2" if world.rank < last else "3"))
    others = "ranks 0-1 (node0)" + (", 2 (node1)" if last == 3 else "")
    assert text == f"code: b is 2 on {others}, 3 on rank {last} (node1): install the same"


@pytest.mark.world(3, 4)
def test_a_rank_that_knows_no_such_thing_differs(world):
    own = subjects(a="1", b="2")
    if world.rank == 1:  # of older code, for instance
        own = {"data": own["data"], "more": RankState({"x": "1"}, "")}
    text = said(world, own)
    assert "code: a is 1 on rank" in text
    assert "missing on rank 1 (" in text
    assert "more: x is missing on rank" in text


@pytest.mark.world(4)
def test_much_that_differs_is_cut_short(world, hosts):
    text = said(world, subjects(**{f"k{n}": f"{world.rank}" * 200 for n in range(9)}))
    assert text.count(" is ") == 5
    assert "and 4 more: install the same" in text
    assert len(text) < 2500
