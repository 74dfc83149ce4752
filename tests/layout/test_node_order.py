from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spatialdl.layout.node_order import cost, numbered, order_by_nodes
from spatialdl.layout.placement import Placement

GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 4))
PLACEMENTS = st.one_of(
    st.builds(Placement, st.integers(1, 4), st.lists(GRIDS, min_size=1, max_size=4).map(tuple)),
    st.builds(
        lambda data, grid, stages, times: Placement(data, (grid,) * stages * times, times),
        *(st.integers(1, 3), GRIDS, st.integers(1, 3), st.integers(2, 3)),
    ),
    st.builds(
        lambda data, grids: Placement(data, tuple(grids), mirrored=True),
        *(st.integers(1, 3), st.lists(GRIDS, min_size=2, max_size=4)),
    ),
    st.builds(
        lambda data, rows, parts: Placement(data, ((rows, 1), (1, 1)), batch=(1, parts)),
        *(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    ),
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Placement, list[str]]:
    """A placement, and the node of each rank in any order."""
    placement = draw(PLACEMENTS)
    count = placement.world_size
    names = [f"node{n}" for n in range(draw(st.integers(1, 5)))]
    return placement, draw(st.lists(st.sampled_from(names), min_size=count, max_size=count))


def launched(kind: str, sizes: list[int]) -> list[int]:
    """The node of each rank, by how Slurm's launcher would deal them out."""
    if kind == "block":
        return [node for node, size in enumerate(sizes) for _ in range(size)]
    return [node for turn in range(max(sizes)) for node, size in enumerate(sizes) if turn < size]


def after(placement: Placement, nodes: list) -> tuple[int, int, int, int]:
    return cost(replace(placement, order=order_by_nodes(placement, nodes)), numbered(nodes))


@settings(max_examples=60)
@given(jobs())
@example((Placement(2, ((2, 2),)), ["a", "b"] * 4))
@example((Placement(1, ((2, 2), (1, 1)), mirrored=True), ["a", "b", "a", "a", "a"]))
def test_an_order_has_every_rank_once_and_is_never_worse(job):
    placement, nodes = job
    order = order_by_nodes(placement, nodes)
    assert order == () or sorted(order) == list(range(len(nodes)))
    before = cost(placement, numbered(nodes))
    assert after(placement, nodes) <= before
    assert (after(placement, nodes) < before) == bool(order)
    assert order == order_by_nodes(placement, [f"another {name}" for name in nodes])


@pytest.mark.parametrize("kind", ["block", "cyclic"])
def test_many_ranks_of_equal_nodes(kind):
    """Of 512 ranks: widths that divide, that do not, and that are too wide."""
    nodes = launched(kind, [8] * 64)
    assert after(Placement(64, ((2, 4),)), nodes) == (0, 0, 0, 0)
    assert after(Placement(64, ((2, 2), (1, 2), (1, 1), (1, 1))), nodes) == (0, 0, 0, 0)
    assert after(Placement(512, ((1, 1),)), nodes) == (0, 0, 0, 0)
    # each stage on nodes of its own, the next one on the next node
    assert after(Placement(32, ((2, 4), (2, 4))), nodes) == (0, 0, 32, 32)
    # blocks of 2x4 where rows would have 8 x 7 sides across
    assert after(Placement(8, ((8, 8),)), nodes) == (8, 8 * 32, 0, 0)
    # seven and one: replicas of 7 ranks must give way to single ones of others
    found = after(Placement(64, ((7, 1), (1, 1))), nodes)
    assert found[:3] == (0, 0, 0)


def test_ranks_dealt_out_in_turn_get_places_node_by_node():
    order = order_by_nodes(Placement(2, ((2, 2),)), ["a", "b"] * 4)
    assert order == (0, 2, 4, 6, 1, 3, 5, 7)
    assert order_by_nodes(Placement(2, ((2, 2),)), ["a"] * 4 + ["b"] * 4) == ()
    assert order_by_nodes(Placement(8, ((1, 1),)), ["a", "b"] * 4) == ()


def test_other_ranks_than_those_of_the_placement_are_refused():
    with pytest.raises(ValueError, match="got nodes of 3 ranks for 1 replica x 2x1 = 2"):
        order_by_nodes(Placement(1, ((2, 1),)), ["a"] * 3)
