from __future__ import annotations

import pytest

from spatialdl.pipeline.schedule import gpipe, one_f_one_b
from spatialdl.pipeline.simulate import StageSeconds, simulate
from spatialdl.planning.shared import simulate_shared


@pytest.mark.parametrize("lists", [gpipe(3, 4), one_f_one_b(4, 5)])
def test_with_a_core_a_rank_it_is_the_other_simulation(lists):
    costs = StageSeconds.even(len(lists))
    found = simulate_shared(lists, [1] * len(lists), costs, len(lists), 1.0)
    assert found.seconds == pytest.approx(simulate(lists, costs).seconds)
    assert found.bubble == pytest.approx(simulate(lists, costs).bubble)


def test_on_one_core_all_work_is_done_one_after_the_other():
    found = simulate_shared(gpipe(3, 4), [1] * 3, StageSeconds.even(3), 1, 1.0)
    assert found.seconds == pytest.approx(3 * 4 * (1 + 2))


def test_replicas_share_the_cores_too():
    alone, both = (simulate_shared(gpipe(1, 2), [n], StageSeconds.even(1), 2, 1.0) for n in (2, 4))
    assert both.seconds == pytest.approx(2 * alone.seconds)


def test_a_rank_is_faster_while_the_other_waits():
    found = simulate_shared(gpipe(2, 1), [1, 1], StageSeconds.even(2), 2, 1.5)
    assert found.seconds == pytest.approx(6 / 1.5)


def test_ranks_that_would_wait_for_ever_are_refused():
    lists = gpipe(2, 1)
    with pytest.raises(ValueError, match="schedule deadlocks"):
        simulate_shared([lists[0][::-1], lists[1]], [1, 1], StageSeconds.even(2), 2, 1.0)
