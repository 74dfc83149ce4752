from __future__ import annotations

import operator
import random
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from spatialdl.comm import trace
from spatialdl.comm import turns as turns_module
from spatialdl.comm.boxed import BoxedTensor, Exchange, Route
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import move
from spatialdl.comm.single_process import SingleProcess
from spatialdl.comm.turns import Turns
from spatialdl.comm.virtual import Virtual, virtual_ranks
from spatialdl.layout.layout import Box


def on(count: int, work: Callable[[Virtual], Any]) -> list[Any]:
    turns: Turns[Any] = Turns(count)
    return turns.run([lambda comm=comm: work(comm) for comm in virtual_ranks(count, turns)])


def test_objects_are_copies():
    def work(comm: Virtual) -> Any:
        own = [comm.rank]
        found = comm.allgather(own)
        found[0].append("written")
        comm.barrier()
        return own, comm.bcast({"of": comm.rank}, 2), comm.gather(comm.rank, 1)

    found = on(3, work)
    assert [one[0] for one in found] == [[0], [1], [2]]
    assert [one[1] for one in found] == [{"of": 2}] * 3
    assert [one[2] for one in found] == [None, [0, 1, 2], None]
    assert on(3, lambda comm: comm.allreduce(comm.rank, operator.sub)) == [-3, -3, -3]
    assert on(2, lambda comm: (comm.nodes(), list(comm.world_ranks))) == [([0, 0], [0, 1])] * 2


def test_sums_and_stacks_of_tensors():
    def work(comm: Virtual) -> Any:
        values = torch.full((2,), float(comm.rank))
        total, stack = comm.all_reduce(values), comm.all_gather(values)
        under_way = comm.start_all_reduce(values)
        under_way.wait()
        total += comm.rank  # of its own
        return total.tolist(), stack.tolist(), values.tolist()

    for rank, (total, stack, values) in enumerate(on(3, work)):
        assert total == [3 + rank] * 2
        assert stack == [[0, 0], [1, 1], [2, 2]]
        assert values == [3, 3]


def test_what_was_sent_may_be_written_to_after_the_wait():
    owned = tuple(Box(((0, 1), bounds)) for bounds in ((0, 2), (2, 4)))
    needed = tuple(Box(((0, 1), (0, 4))) for _ in range(2))

    def work(comm: Virtual) -> Any:
        plan = Plan(owned, needed, comm.rank)
        tile = torch.full((1, 2), float(comm.rank))
        window = move(comm, plan, tile)
        tile.fill_(9.0)
        comm.barrier()
        return window.tolist()

    assert on(2, work) == [[[0, 0, 1, 1]]] * 2


def test_hand_overs_are_refused():
    owned = tuple(Box(((0, 1), bounds)) for bounds in ((0, 2), (2, 4)))

    def work(comm: Virtual) -> None:
        plan = Plan(owned, owned[::-1], comm.rank)
        tile, room = torch.zeros(1, 2), torch.zeros(1, 2)
        sends, receives = [BoxedTensor(tile, plan.own)], [BoxedTensor(room, plan.need)]
        route = Route([0, 1], 7)
        start_exchange(comm, Exchange(plan, sends, receives, tile.device, route=route))

    with pytest.raises(NotImplementedError, match="collective exchanges only"):
        on(2, work)


def test_one_is_active_at_a_time_in_a_fixed_order():
    turns: Turns[int] = Turns(3)
    seen, counts = [], [0, 0, 0]

    def work(me: int) -> int:
        for step in range(2):
            seen.append((me, step))
            counts[me] += 1
            turns.wait(lambda step=step: min(counts) > step)
        return me

    assert turns.run([lambda me=me: work(me) for me in range(3)]) == [0, 1, 2]
    assert seen[:3] == [(0, 0), (1, 0), (2, 0)]
    assert sorted(seen[3:]) == [(0, 1), (1, 1), (2, 1)]
    assert turns.run([lambda: 5] * 3) == [5, 5, 5]  # again


def test_an_error_ends_all_and_is_raised():
    turns: Turns[None] = Turns(3)
    ended = []

    def waits() -> None:
        try:
            turns.wait(lambda: False)
        finally:
            ended.append(threading.current_thread().name)

    def fails() -> None:
        raise KeyError("of the second")

    with pytest.raises(KeyError, match="of the second"):
        turns.run([waits, fails, waits])
    assert ended == ["virtual rank 0"]  # the third has never begun
    assert not [one for one in threading.enumerate() if "virtual rank" in one.name]


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_threads_are_reused_on_machines_with_an_accelerator(has_accelerator, monkeypatch):
    """cuDNN's plans were built again for each convolution of each step, as they are per thread."""
    monkeypatch.setattr(turns_module, "_kept", {})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    monkeypatch.setattr(turns_module, "_thread_contexts", list)
    before = threading.enumerate()  # those of other tests may end meanwhile
    own = threading.local()

    def work() -> tuple[int, str]:
        own.calls = getattr(own, "calls", 0) + 1
        return own.calls, threading.current_thread().name

    def raises() -> tuple[int, str]:
        work()
        raise KeyError("in a thread")

    names = ["virtual rank 0", "virtual rank 1"]
    turns: Turns[tuple[int, str]] = Turns(2)
    assert turns.run([work] * 2) == [(1, name) for name in names]
    with pytest.raises(KeyError, match="in a thread"):
        turns.run([work, raises])
    found = Turns(2).run([lambda: Turns(1).run([work])[0], work])  # one within another
    last = 3 if has_accelerator else 1
    assert found == [(1, names[0]), (last, names[1])]
    new = [one for one in threading.enumerate() if one not in before]
    assert len(new) == 3 * has_accelerator
    assert not [one for one in threading.enumerate() if "virtual rank" in one.name]
    for thread in chain.from_iterable(turns_module._kept.values()):
        thread._jobs.put(None)
        thread._thread.join()


def test_what_a_job_refers_to_is_freed_when_its_thread_is_kept(monkeypatch):
    monkeypatch.setattr(turns_module, "_kept", {})
    thread = turns_module._Thread.take(0)
    kept = torch.zeros(3)
    reference = weakref.ref(kept)
    thread.start(partial(kept.add_, 1))
    del kept
    thread.join()
    assert reference() is None
    thread.leave()


def test_each_draws_the_numbers_that_the_caller_would_draw():
    turns: Turns[list[float]] = Turns(2)
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    alone = [(float(torch.rand(())), float(np.random.rand()), random.random()) for _ in range(2)]
    then = float(torch.rand(()))
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    met = []

    def work() -> list[tuple[float, float, float]]:
        found = []
        for step in range(2):
            found.append((float(torch.rand(())), float(np.random.rand()), random.random()))
            met.append(step)
            turns.wait(lambda step=step: met.count(step) == 2)
        return found

    assert turns.run([work, work]) == [alone, alone]
    assert float(torch.rand(())) == then


def test_threads_have_the_modes_of_the_caller():
    turns: Turns[tuple[bool, bool, torch.dtype]] = Turns(2)

    def modes() -> tuple[bool, bool, torch.dtype]:
        enabled = torch.is_autocast_enabled("cpu")
        return torch.is_grad_enabled(), enabled, torch.get_autocast_dtype("cpu")

    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert turns.run([modes, modes]) == [(False, True, torch.float16)] * 2
    assert turns.run([modes, modes])[0][:2] == (True, False)


def test_turns_of_others_are_no_wait(monkeypatch):
    """They were counted: a report said that nearly all of a step was waiting for sums."""
    clock, done = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    turns: Turns[None] = Turns(2)

    def waits() -> None:
        with trace.span("reduce", "a sum"):
            clock[0] += 1
            turns.wait(lambda: bool(done))
            clock[0] += 2

    def computes() -> None:
        clock[0] += 100
        done.append(True)

    trace.count()
    turns.run([waits, computes])
    seconds = trace.counted()["reduce"]
    trace.stop_counting()
    assert seconds == 3


def test_a_single_process_has_nobody_to_talk_to():
    alone, values = SingleProcess(), torch.arange(3.0)
    assert alone.subset([0]).duplicate().allgather("x") == ["x"]
    assert (alone.bcast(1), alone.gather(2), alone.allreduce(3, max)) == (1, [2], 3)
    total = alone.all_reduce(values)
    assert torch.equal(total, values)
    assert total.data_ptr() != values.data_ptr()
    assert alone.all_gather(values).shape == (1, 3)
    halves = Box(((0, 1), (0, 1), (0, 1))), Box(((0, 1), (1, 2), (0, 1)))
    talks = Exchange(Plan(halves, halves[::-1], 0), [], [], torch.device("cpu"))
    with pytest.raises(RuntimeError, match="single process"):
        start_exchange(alone, talks)
