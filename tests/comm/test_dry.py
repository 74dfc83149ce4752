from __future__ import annotations

import pytest
import torch

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.dry import Dry, Talk, record_talks
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.plan import Plan
from spatialdl.comm.reduce import gather_over_ranks, sum_over_ranks
from spatialdl.comm.replay import ReplayTape, aside, exchange_once, once, replaying
from spatialdl.layout.layout import Box


def test_what_would_be_said_is_noted_while_somebody_listens():
    comm, values = Dry(1, 4), torch.empty(3, device="meta")
    sum_over_ranks(comm, values)
    with record_talks() as outer:
        assert sum_over_ranks(comm, values).shape == (3,)
        with record_talks() as inner:
            assert gather_over_ranks(comm, values).shape == (4, 3)
    assert outer == [Talk("sum", 4, 12), Talk("gather", 4, 12)]
    assert inner == outer[1:]


def test_what_runs_again_says_nothing_twice():
    tape, comm = ReplayTape(), Dry(0, 2, "tensor")
    with record_talks() as heard:
        with tape.record():
            comm.record("sum", 8)
        with tape.replay():
            comm.record("sum", 8)
    assert heard == [Talk("sum", 2, 8, "tensor")]


def test_of_virtual_ranks_is_noted_what_passes_between_processes():
    """Four in a row, two a process; each needs a pixel of its neighbours."""
    comm = Dry(0, 4, processes=((0, 1), (2, 3)))
    owned = [Box(((0, 1), (3 * n, 3 * n + 3))) for n in range(4)]
    needed = [Box(((0, 1), (max(0, 3 * n - 1), min(12, 3 * n + 4)))) for n in range(4)]
    plan = Plan(owned, needed, 0)
    tile, window = (torch.empty(1, 5, size, device="meta") for size in (3, 4))
    own, wide = BoxedTensor(tile, plan.own), BoxedTensor(window, plan.need)
    with record_talks() as heard:
        start_exchange(comm, Exchange(plan, [own], [wide], tile.device)).wait()
        start_exchange(comm, Exchange(plan, [wide], [own], tile.device, adjoint=True)).wait()
        sum_over_ranks(comm, torch.empty(3, device="meta"))
        gather_over_ranks(comm, torch.empty(3, device="meta"))
    # rank 0 has none of what passes, but its process has
    pixel = 5 * 4
    moves = [Talk("exchange", 1, pixel), Talk("exchange", 1, pixel)]
    assert heard == [*moves, Talk("sum", 2, 12), Talk("gather", 2, 2 * 12)]


def test_virtual_ranks_of_one_process_send_nothing():
    with record_talks() as heard:
        sum_over_ranks(Dry(0, 2, processes=((0, 1),)), torch.empty(3, device="meta"))
    assert heard == []


class Asked:
    """Somebody who gives 1, 2, 3 ... and counts."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> torch.Tensor:
        self.times += 1
        return torch.full((2,), float(self.times))


class Filling:
    """Fills what it was given when it is waited for."""

    def __init__(self, views, value):
        self.views, self.value = views, value

    def wait(self):
        for view in self.views:
            view.fill_(self.value)


def test_a_second_run_hears_the_same_without_asking():
    ask, tape = Asked(), ReplayTape()
    with tape.record():
        first = [once(ask) for _ in range(3)]
        assert not replaying()
    second_run = tape.replay()
    for _ in range(2):  # with retain_graph backward comes again
        with second_run:
            assert replaying()
            assert [once(ask).tolist() for _ in range(3)] == [value.tolist() for value in first]
    assert ask.times == 3
    assert not replaying()


def test_what_is_written_into_an_answer_does_not_reach_the_tape():
    ask, tape = Asked(), ReplayTape()
    with tape.record():
        once(ask).zero_()
    for _ in range(2):
        with tape.replay():
            assert once(ask).zero_().sum() == 0
    with tape.replay():
        assert once(ask).tolist() == [1, 1]


def test_exchanges_under_way_together_keep_apart():
    tape, views = ReplayTape(), [torch.zeros(2), torch.zeros(3)]
    with tape.record():
        one = exchange_once(lambda: Filling(views[:1], 1.0), views[:1])
        two = exchange_once(lambda: Filling(views[1:], 2.0), views[1:])
        two.wait()
        one.wait()
    for view in views:
        view.zero_()
    with tape.replay():
        one = exchange_once(pytest.fail, views[:1])
        two = exchange_once(pytest.fail, views[1:])
        assert views[0].sum() == 0
        one.wait()
        two.wait()
    assert (views[0].tolist(), views[1].tolist()) == ([1, 1], [2, 2, 2])


def test_a_part_within_a_part_is_heard_by_both():
    ask, outer, inner = Asked(), ReplayTape(), ReplayTape()
    with outer.record():
        once(ask)
        with inner.record():
            once(ask)
    again = ReplayTape()
    with outer.replay():
        assert once(ask).tolist() == [1, 1]
        with again.record():
            assert replaying()
            assert once(ask).tolist() == [2, 2]
    with again.replay():
        assert once(ask).tolist() == [2, 2]
    assert ask.times == 2


def test_what_is_said_aside_is_not_on_the_tape():
    ask, tape = Asked(), ReplayTape()
    with tape.record(), aside():
        once(ask)
    assert tape.kept == []
    with tape.replay(), aside():
        assert once(ask).tolist() == [2, 2]


def test_a_second_run_that_asks_for_something_else_is_refused():
    tape, view = ReplayTape(), torch.zeros(2)
    with tape.record():
        exchange_once(lambda: Filling([view], 1.0), [view]).wait()
    with tape.replay(), pytest.raises(RuntimeError, match=r"expects \(3,\), .* received \(2,\)"):
        exchange_once(pytest.fail, [torch.zeros(3)]).wait()


def test_a_run_that_stops_early_leaves_no_tape_behind():
    tape = ReplayTape()
    with pytest.raises(KeyError), tape.record():
        raise KeyError
    ask = Asked()
    once(ask)
    assert tape.kept == []
