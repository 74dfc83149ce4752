"""Both transports do the same; over torch.distributed networks equal one process as over MPI."""

from __future__ import annotations

import gc
import operator
from functools import cache
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

import spatialdl
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.distributed import TorchCommunicator
from spatialdl.comm.launch import launched
from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import move, view_of
from spatialdl.comm.world import as_communicator, torch_world
from spatialdl.layout.layout import Box, Layout
from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import TOLERANCE, parallel, reference
from tests.mpi.one_message import start_receive, start_send

CASES = [
    Case("sp", "odd", (41, 67), ((1, 2),), microbatches=3, batch=7),
    Case("pp", "resnet18", (33, 35), ((1, 1), (1, 1)), microbatches=2),
    Case("sp+pp", "odd", (101, 50), ((1, 1), (2, 1)), microbatches=2, cut=("4",)),
    Case("dp+sp", "odd", (41, 67), ((1, 2),), data=2, microbatches=2, batch=9),
    Case("sp+pp", "odd", (101, 50), ((2, 1), (1, 2)), microbatches=2, cut=("4",)),
]


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@cache
def over_torch() -> Communicator:
    return torch_world(launched())


@pytest.fixture(params=["mpi", "torch"])
def ranks(request: pytest.FixtureRequest) -> Communicator:
    """All ranks, over each transport."""
    return as_communicator(MPI.COMM_WORLD) if request.param == "mpi" else over_torch()


def test_a_rank_may_send_to_itself(ranks: Communicator) -> None:
    """As between two stages of one rank; in order, and expected before they are sent."""
    first, second = torch.empty(2, 3), torch.empty(2, 3).T
    arriving = [start_receive(ranks, one, ranks.rank, 7) for one in (first, second)]
    sent = torch.arange(6.0).view(2, 3)
    leaving = [start_send(ranks, one, ranks.rank, 7) for one in (sent, -sent.view(3, 2))]
    for one in (*arriving, *leaving):
        one.wait()
    assert torch.equal(first, sent)
    assert torch.equal(second, -sent.view(3, 2))


def test_meshes_over_torch_leave_no_threads_behind() -> None:
    """A program that made some hundred meshes, one after the other, once ran out of threads."""
    ranks = over_torch()
    ranks.barrier()
    counts = []
    for _ in range(3):  # the first one may start threads that serve all
        if ranks.rank == 0:  # groups of its own must not put the names of others out of step
            TorchCommunicator([0]).barrier()
        mesh = spatialdl.init_mesh((ranks.size, 1), comm=ranks)
        assert mesh.comm.allreduce(1) == ranks.size
        del mesh
        gc.collect()
        counts.append(threads())
    assert counts[1] == counts[2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process_over_torch(case: Case) -> None:
    if case.placement.world_size != MPI.COMM_WORLD.size:
        pytest.skip(f"needs {case.placement.describe()}")
    ours, plain = parallel(case, over_torch()), reference(case)  # type: ignore[arg-type]
    assert ours.losses == pytest.approx(plain.losses, abs=TOLERANCE)
    for name, value in ours.state.items():
        difference = (value.double() - plain.state[name].double()).abs().max()
        assert difference <= TOLERANCE, f"{name} differs by {difference}"


def test_objects_go_to_one_or_all(ranks: Communicator) -> None:
    assert (ranks.rank, ranks.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    own = {"rank": ranks.rank}
    everybody = [{"rank": rank} for rank in range(ranks.size)]
    assert ranks.allgather(own) == everybody
    last = ranks.size - 1
    assert ranks.gather(own, last) == (everybody if ranks.rank == last else None)
    assert ranks.bcast(own, last) == everybody[last]
    assert ranks.allreduce(ranks.rank + 1) == sum(range(1, ranks.size + 1))
    assert ranks.allreduce(f"{ranks.rank}", op=operator.add) == "0123456"[: ranks.size]
    assert ranks.allreduce(ranks.rank, op=MPI.MAX) == last
    ranks.barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_sums_are_new_and_the_same_bits(ranks: Communicator, dtype: torch.dtype) -> None:
    own = (torch.arange(35).view(5, 7) / 3 + ranks.rank).to(dtype).t()
    before = own.clone()
    dense = own.contiguous()
    total = ranks.all_reduce(own)
    assert torch.equal(ranks.all_reduce(dense), total)
    assert torch.equal(own, before)
    assert torch.equal(dense, before)
    parts = ranks.all_gather(own)
    assert parts.shape == (ranks.size, 7, 5)
    torch.testing.assert_close(total, parts.sum(0).to(dtype))
    assert torch.equal(parts[ranks.rank], own)
    assert all(torch.equal(theirs, total) for theirs in ranks.all_gather(total))


def test_a_sum_may_be_started_and_waited_for(ranks: Communicator) -> None:
    values = torch.arange(1000.0) * (ranks.rank + 1)
    ranks.start_all_reduce(values).wait()
    assert torch.equal(values, torch.arange(1000.0) * sum(range(1, ranks.size + 1)))


def test_a_subset_has_its_ranks_in_the_order_given(ranks: Communicator) -> None:
    """Backwards, so that the order of the world does not do."""
    mine = [rank for rank in reversed(range(ranks.size)) if rank % 2 == ranks.rank % 2]
    part = ranks.subset(mine)
    assert (part.size, part.rank) == (len(mine), mine.index(ranks.rank))
    assert part.allgather(ranks.rank) == list(part.world_ranks) == mine
    assert part.all_gather(torch.tensor(ranks.rank)).tolist() == mine
    assert part.bcast(ranks.rank) == mine[0]
    again = part.subset(range(part.size)[::-1]).duplicate()
    assert again.allgather(ranks.rank) == list(again.world_ranks) == mine[::-1]
    if part.size > 1 and part.rank < 2:
        other = 1 - part.rank
        sending = start_send(part, torch.tensor([[ranks.rank]]), other, 5)
        landed = torch.zeros(1, 1, dtype=torch.int64)
        start_receive(part, landed, other, 5).wait()
        sending.wait()
        assert landed.item() == mine[other]


def test_messages_are_told_apart_by_tags(ranks: Communicator) -> None:
    """Any view is sent as it looks, and lands in any other."""
    lane = ranks.duplicate()
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(3, 4, 5, generator=draw).to(torch.bfloat16) for _ in range(3)]
    if ranks.rank == 0:
        views = [values[0].clone(), values[1].transpose(0, 2).contiguous().transpose(0, 2)]
        views.append(torch.stack([values[2], values[0]], 3)[..., 0])
        tags = (7, 8, 7)
        sendings = [start_send(lane, view, 1, tag) for view, tag in zip(views, tags, strict=True)]
        for sending in sendings:
            sending.wait()
    elif ranks.rank == 1:
        for expected, tag in ((1, 8), (0, 7), (2, 7)):
            landed = torch.zeros(4, 3, 5, dtype=torch.bfloat16).transpose(0, 1)
            start_receive(lane, landed, 0, tag).wait()
            assert torch.equal(landed, values[expected])


def shifted(ranks: Communicator, size: tuple[int, int, int]) -> Plan:
    """Every rank needs its rows of a striped image, one more on either side, and all columns."""
    samples, height, width = size
    layout = Layout.even(samples, (height, width), (ranks.size, 1))
    needed = [
        Box(((0, samples), (max(box[1][0] - 1, 0), min(box[1][1] + 1, height)), (0, width)))
        for box in layout.boxes
    ]
    return Plan(layout.boxes, needed, ranks.rank)


@pytest.mark.parametrize(
    ("dtype", "channels_last"), [(torch.float64, False), (torch.bfloat16, True), (torch.bool, True)]
)
def test_a_plan_moves_the_same(
    ranks: Communicator, dtype: torch.dtype, channels_last: bool
) -> None:
    draw = torch.Generator().manual_seed(1)
    image = (torch.randn(2, 3, 13, 6, generator=draw) > 0).to(dtype)
    plan = shifted(ranks, (2, 13, 6))
    whole = Box(((0, 2), (0, 13), (0, 6)))
    tile = view_of(image, whole, plan.own).clone()
    if channels_last:
        tile = tile.contiguous(memory_format=torch.channels_last)
    assert torch.equal(move(ranks, plan, tile), view_of(image, whole, plan.need))


def test_ranks_without_neighbours_take_part(ranks: Communicator) -> None:
    """Rank 0 sends to rank 1 only; the others have nothing to do."""
    own = [Box(((0, 1), (rank, rank + 1), (0, 4))) for rank in range(ranks.size)]
    needed = [own[0], own[0], *own[2:]]
    plan = Plan(own, needed, ranks.rank)
    tile = torch.full((1, 1, 1, 4), float(ranks.rank))
    for _ in range(3):
        moved: Tensor = move(ranks, plan, tile)
        assert moved.unique().tolist() == [0.0 if ranks.rank == 1 else float(ranks.rank)]
