"""With ``comm.check`` ranks that go different ways are told so, all of them, before they talk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

from spatialdl import CommMismatch, init_mesh, shard
from spatialdl.comm import check
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

KERNEL = torch.ones(1, 2, 3, 3)
OPERATIONS: dict[str, Callable[[Tensor], object]] = {
    "conv2d": lambda x: F.conv2d(x, KERNEL, padding=1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 1, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "sum": lambda x: x.sum(),
    "full_tensor": lambda x: x.full_tensor(),
}
PAIRS = [(one, other) for one in OPERATIONS for other in OPERATIONS if one < other]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_all_ranks_hear_of_both_sides(one: str, other: str, world: MPI.Intracomm) -> None:
    mesh = init_mesh((world.size, 1))
    x = shard(torch.rand(2, 2, 12, 8), mesh)
    name = one if world.rank == 0 else other
    with pytest.raises(CommMismatch, match="ranks call different operations") as error:
        OPERATIONS[name](x)
    text = str(error.value)
    assert f"rank {world.rank} is at '{name}" in text
    expected = f"rank 1 at '{other}" if world.rank == 0 else f"rank 0 at '{one}"
    assert expected in text
    assert "control flow that depends on the rank" in text
    OPERATIONS["sum"](x)  # nobody has talked; all can go on


def test_the_same_operation_on_images_of_other_sizes(world: MPI.Intracomm) -> None:
    mesh = replace(init_mesh((world.size, 1)), agreement=None)  # which would notice before
    x = shard(torch.rand(1, 2, 12 if world.rank else 16, 8), mesh)
    with pytest.raises(CommMismatch, match="conv2d forward plan"):
        F.conv2d(x, KERNEL, padding=1)


def test_forward_and_backward_are_told_apart(world: MPI.Intracomm) -> None:
    mesh = init_mesh((world.size, 1))
    x = shard(torch.rand(1, 2, 12, 8), mesh).requires_grad_()
    y = F.conv2d(x, KERNEL, padding=1)
    loss = (y * 2).to_local().sum()
    step = (lambda: F.conv2d(x.detach(), KERNEL, padding=1)) if world.rank == 0 else loss.backward
    with pytest.raises(CommMismatch, match=r"conv2d (adjoint|forward) plan .*conv2d"):
        step()


def test_without_it_the_last_communications_of_each_group_are_remembered(
    world: MPI.Intracomm,
) -> None:
    check.enable(False)
    try:
        mesh = init_mesh((world.size, 1))
        gradients = mesh.comm.duplicate()
        for number in range(2 * check.KEPT):
            check.agree(mesh.grid_comm, f"operation {number}")
        check.agree(gradients, "gradients")
        done = check.last_calls()
    finally:
        check.enable()
    if world.size == 1:
        return
    *operations, last = done[-check.KEPT - 1 :]
    assert [(one.number, one.text) for one in operations] == [
        (number + 1, f"operation {number}") for number in range(check.KEPT, 2 * check.KEPT)
    ]
    assert (last.number, last.text) == (1, "gradients")
    assert len({one.group for one in done}) > 1
    everywhere = world.allgather(done[-check.KEPT - 1 :])
    assert all(one == everywhere[0] for one in everywhere)  # whatever each calls the groups


def test_the_first_rank_that_differs_is_named(world: MPI.Intracomm) -> None:
    with pytest.raises(CommMismatch) as error:
        check.agree(world, f"step {min(world.rank, 1)}")
    other = 1 if world.rank == 0 else 0
    assert f"rank {other} at 'step {other}'" in str(error.value)


@pytest.mark.world(2, 3, 4)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("grid", lambda ranks, rank: {"grid": (ranks, 1) if rank else (1, ranks)}),
        ("check", lambda ranks, rank: {"grid": (ranks, 1), "check": rank == 0}),
        ("timeout", lambda ranks, rank: {"grid": (ranks, 1), "timeout": 100.0 + rank}),
    ],
)
def test_different_arguments_are_refused(name: str, arguments: Any, world: MPI.Intracomm) -> None:
    before = check.enabled()
    with pytest.raises(ValueError, match=f"init_mesh with different arguments: {name}="):
        init_mesh(**arguments(world.size, world.rank))
    assert check.enabled() == before


@pytest.mark.parametrize("timeout", [-1, "soon", float("inf"), True])
def test_a_timeout_that_is_none_is_refused(timeout: Any, world: MPI.Intracomm) -> None:
    with pytest.raises(ValueError, match=r"timeout=.* must be the seconds .* or None for no limit"):
        init_mesh((world.size, 1), timeout=timeout)


def test_the_check_is_switched(world: MPI.Intracomm) -> None:
    before = check.enabled()
    for on in (False, True):
        init_mesh((world.size, 1), check=on)
        init_mesh((world.size, 1))
        assert check.enabled() == on
    check.enable(before)


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
