from __future__ import annotations

import torch

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.dry import Dry, DryEvent, Talk, follow_events, record, record_talks
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.plan import Plan
from spatialdl.comm.reduce import gather_over_ranks, sum_over_ranks
from spatialdl.comm.replay import ReplayTape
from spatialdl.parallel.layout import Box


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
            record(comm, "sum", 2, 8)
        with tape.replay():
            record(comm, "sum", 2, 8)
    assert heard == [Talk("sum", 2, 8, "tensor")]


def test_a_rank_by_itself_says_nothing():
    with record_talks() as heard:
        sum_over_ranks(Dry(0, 1), torch.empty(3, device="meta"))
    assert heard == []


def test_of_virtual_ranks_is_noted_what_passes_between_processes():
    """Four in a row, two a process; each needs a pixel of its neighbours."""
    comm, events = Dry(0, 4, processes=((0, 1), (2, 3))), list[DryEvent]()
    owned = [Box(((0, 1), (3 * n, 3 * n + 3))) for n in range(4)]
    needed = [Box(((0, 1), (max(0, 3 * n - 1), min(12, 3 * n + 4)))) for n in range(4)]
    plan = Plan(owned, needed, 0)
    tile, window = (torch.empty(1, 5, size, device="meta") for size in (3, 4))
    own, wide = BoxedTensor(tile, plan.own), BoxedTensor(window, plan.need)
    with record_talks() as heard, follow_events(events.append):
        start_exchange(comm, Exchange(plan, [own], [wide], tile.device)).wait()
        start_exchange(comm, Exchange(plan, [wide], [own], tile.device, adjoint=True)).wait()
        sum_over_ranks(comm, torch.empty(3, device="meta"))
        gather_over_ranks(comm, torch.empty(3, device="meta"))
    # rank 0 has none of what passes, but its process has
    pixel = 5 * 4
    moves = [Talk("exchange", 1, pixel), Talk("exchange", 1, pixel)]
    assert heard == [*moves, Talk("sum", 2, 12), Talk("gather", 2, 2 * 12)]
    bring = DryEvent("bring", (pixel,), ((1,), (0,)))
    calls = [DryEvent("bring"), DryEvent("wait for all")]
    assert events == [bring, DryEvent("wait"), bring, DryEvent("wait"), *calls, *calls]


def test_virtual_ranks_of_one_process_send_nothing():
    with record_talks() as heard:
        sum_over_ranks(Dry(0, 2, processes=((0, 1),)), torch.empty(3, device="meta"))
    assert heard == []
