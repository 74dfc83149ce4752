from __future__ import annotations

from types import SimpleNamespace

from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.stage_groups import stage_groups, stage_ranks

ONE, TWO = (1, 1), (2, 1)
FIRST = SimpleNamespace(channels=0)  # a mesh


def test_the_ranks_of_all_replicas_and_copies_hold_a_stage():
    plain, mirrored = Placement(2, (TWO, ONE)), Placement(2, (TWO, ONE), mirrored=True)
    assert [stage_ranks(plain, stage) for stage in range(2)] == [[0, 1, 3, 4], [2, 5]]
    assert [stage_ranks(mirrored, stage) for stage in range(2)] == [
        [0, 1, 2, 3, 4, 5],
        [0, 2, 3, 5],
    ]


def test_each_part_of_the_channels_is_held_by_ranks_of_its_own():
    plain = Placement(2, (TWO, ONE), tensor=(1, 2))
    assert [stage_ranks(plain, 1, tensor) for tensor in range(2)] == [[2, 6], [3, 7]]
    mirrored = Placement(1, (ONE, ONE), mirrored=True, tensor=(2, 2))
    assert [stage_ranks(mirrored, 0, tensor) for tensor in range(2)] == [[0, 2], [1, 3]]


def test_without_copies_it_is_those_of_the_mesh():
    meshes = {1: SimpleNamespace(comm="those of stage 1")}
    assert stage_groups(Placement(1, (ONE, ONE)), meshes, None) == {1: "those of stage 1"}


def test_ranks_with_two_stages_meet_in_one_order():
    """A rank has its stages copy by copy, another one the other way round: they would hang."""
    asked = []
    comm = SimpleNamespace(subset=lambda ranks: asked.append(ranks) or len(asked))
    placement = Placement(1, (ONE,) * 4, mirrored=True)
    for stages in ((1, 2), (2, 1)):
        asked.clear()
        stage_groups(placement, dict.fromkeys(stages, FIRST), comm)
        assert asked == [[1, 2], [1, 2]]
    placement = Placement(1, (TWO, ONE), mirrored=True)
    found = stage_groups(placement, dict.fromkeys((1, 0), FIRST), comm)
    assert asked[2:] == [[0, 1, 2], [0, 2]]
    assert list(found) == [0, 1]
