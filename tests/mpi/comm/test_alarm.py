"""Ranks that tell each other that one waits too long, by messages and by the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from mpi4py import MPI

from spatialdl.comm.alarm import (
    MOST,
    Alarm,
    AlarmReport,
    ByMessages,
    ByStore,
    Unheard,
    alarm_between,
)
from spatialdl.comm.communicator import Communicator

pytestmark = pytest.mark.world(2, 3, 4)
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def report(rank: int, raised: bool) -> AlarmReport:
    text = f"rank {rank} waits ".ljust(MOST, ".")  # the longest there is
    return AlarmReport(rank, text, raised, rank > 0, {"1": "stopped"})


def by_store() -> Alarm:
    return ByStore(RANK, SIZE)


@pytest.fixture(params=[ByMessages, by_store])
def alarm(
    request: pytest.FixtureRequest, over_mpi4py: object, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Alarm]:
    monkeypatch.setattr(ByStore, "LOOK_S", 0.1)
    # of the store each test has keys of its own
    place = request.node.name
    monkeypatch.setattr("torch.distributed.PrefixStore", prefixed(place))
    made = request.param()
    yield made
    MPI.COMM_WORLD.Barrier()
    made.close()


def prefixed(place: str) -> Callable[..., object]:
    from torch.distributed import PrefixStore

    return lambda prefix, store: PrefixStore(f"{prefix}/{place}", store)


def until(alarm: Alarm, ranks: set[int]) -> dict[int, AlarmReport]:
    """What is heard when these have been heard; what does not come runs out of the test's time."""
    while not ranks <= alarm.received().keys():
        pass
    return dict(alarm.received())


def test_all_hear_an_alarm_and_who_raised_it_hears_all(alarm: Alarm) -> None:
    assert alarm.received() == {}
    MPI.COMM_WORLD.Barrier()
    last, others = SIZE - 1, set(range(SIZE)) - {RANK}
    if last == RANK:
        alarm.send(report(RANK, raised=True))
        heard = until(alarm, others)
        assert heard == {rank: report(rank, raised=False) for rank in others}
    else:
        assert until(alarm, {last})[last] == report(last, raised=True)
        alarm.send(report(RANK, raised=False))
    assert alarm.reaches
    MPI.COMM_WORLD.Barrier()
    assert RANK not in alarm.received()
    if isinstance(alarm, ByMessages) and last != RANK:
        assert alarm.received().keys() == {last}  # who raised none needs no answer


def test_several_may_raise_it_at_once(alarm: Alarm) -> None:
    alarm.send(report(RANK, raised=True))
    others = set(range(SIZE)) - {RANK}
    assert until(alarm, others) == {rank: report(rank, raised=True) for rank in others}


def test_an_answer_is_heard_by_those_that_raised_the_alarm_after_it(alarm: Alarm) -> None:
    others = set(range(SIZE)) - {RANK}
    if RANK > 0:
        alarm.send(report(RANK, raised=RANK == 1))
    MPI.COMM_WORLD.Barrier()
    if RANK == 0:
        alarm.send(report(0, raised=True))
    if RANK < 2:
        assert until(alarm, others).keys() == others
    else:
        assert until(alarm, {0, 1})[1] == report(1, raised=True)
    MPI.COMM_WORLD.Barrier()


def test_messages_are_taken_where_mpi_lets_threads_talk(world: Communicator) -> None:
    talks = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    alarm = alarm_between(world)
    assert isinstance(alarm, ByMessages if talks else Unheard)
    assert alarm.reaches == talks


def test_a_rank_that_has_ended_says_so_when_asked(over_mpi4py: object) -> None:
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("MPI takes calls from one thread only")
    alarm = ByMessages()
    others = [rank for rank in range(SIZE) if rank != RANK]
    alarm.query_exit(others)  # before it ends
    MPI.COMM_WORLD.Barrier()
    assert (alarm.received(), alarm.exited()) == ({}, set())
    MPI.COMM_WORLD.Barrier()
    if RANK == 0:
        alarm.serve_until_all_exit()  # returns when all have ended
        return
    while 0 not in alarm.exited():
        alarm.received()
    alarm.query_exit([0])  # and afterwards
    alarm.serve_until_all_exit()
