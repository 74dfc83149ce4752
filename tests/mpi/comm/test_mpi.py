"""What is MPI's alone; `test_transport` has what both transports do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import torch
from mpi4py import MPI

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.plan import Plan
from spatialdl.parallel.layout import Box
from tests.mpi.one_message import start_receive, start_send
from tests.mpi.waits import told_by_the_first

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
FORWARD, BACKWARD = tuple(range(SIZE)), tuple(range(SIZE))[::-1]
COMM = MpiCommunicator(MPI.COMM_WORLD)

pytestmark = pytest.mark.skipif(SIZE < 2, reason="needs ranks")


@pytest.mark.parametrize(
    ("what", "do", "expected"),
    [
        ("barrier", lambda part: part.barrier(), BACKWARD),
        ("all-reduce", lambda part: part.all_reduce(torch.ones(3)), BACKWARD),
        ("creation of a communicator", lambda part: part.duplicate(), BACKWARD),
        ("creation of a communicator", lambda part: part.subset(BACKWARD), FORWARD),
    ],
)
def test_ranks_of_a_subset_are_told_as_the_world_calls_them(
    what: str,
    do: Callable[[MpiCommunicator], object],
    expected: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """In a subset that has them backwards."""
    part = COMM.subset(BACKWARD)
    wait = told_by_the_first(tmp_path, what, lambda: do(part))
    if wait is not None:
        assert wait.ranks == expected


def test_tensors_that_lie_otherwise_on_other_ranks_are_added_up() -> None:
    values = torch.arange(35.0).view(5, 7)
    own = values.t().contiguous().t() if RANK % 2 else values.clone()
    assert torch.equal(COMM.all_reduce(own), SIZE * values)
    assert torch.equal(own, values)


def test_a_duplicate_has_messages_of_its_own() -> None:
    lanes = [COMM, COMM.duplicate()]
    if RANK == 0:
        sendings = [
            start_send(lane, torch.tensor([[number]]), 1, 5) for number, lane in enumerate(lanes)
        ]
        for sending in sendings:
            sending.wait()
    if RANK == 1:
        for number in (1, 0):  # of one lane, they would come in the order in which they left
            landed = torch.full((1, 1), -1)
            start_receive(lanes[number], landed, 0, 5).wait()
            assert landed.item() == number


def test_the_way_of_exchanges_is_found_out_once() -> None:
    ranks = COMM.duplicate()
    own = [Box(((0, 1), (rank, rank + 1), (0, 4))) for rank in range(SIZE)]
    plan = Plan(own, own[1:] + own[:1], RANK)
    for way in (None, "neighbourhood collective", "packed pieces"):
        ranks.strategy = way
        tile, landed = torch.full((1, 1, 1, 4), float(RANK)), torch.zeros(1, 1, 1, 4)
        sends, receives = [BoxedTensor(tile, plan.own)], [BoxedTensor(landed, plan.need)]
        start_exchange(ranks, Exchange(plan, sends, receives, tile.device)).wait()
        assert landed.unique().tolist() == [(RANK + 1) % SIZE]
        assert ranks.strategy is not None
        assert way in (None, ranks.strategy)


def test_other_threads_run_while_a_rank_waits_for_a_sum_of_objects() -> None:
    """In mpi4py's own `allreduce` they did not: neither a watchdog nor what reads samples ahead."""
    comm = COMM
    if comm.rank == 0:
        call = Thread(target=lambda: [sum(range(3_000_000)), MPI.COMM_WORLD.send("go on", 1, 5)])
        call.start()
    if comm.rank == 1:  # which keeps all others waiting until rank 0's thread has run
        MPI.COMM_WORLD.recv(source=0, tag=5)
    assert comm.allreduce(comm.rank) == sum(range(comm.size))
    if comm.rank == 0:
        call.join()
