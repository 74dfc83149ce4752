from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from spatialdl.comm.gradients import average_
from spatialdl.comm.groups import BackendCommunicator, new_group, start
from tests.mpi.device import DEVICE

pytestmark = pytest.mark.usefixtures("ends_process_group")
WORLD = MPI.COMM_WORLD


@pytest.mark.parametrize("name", ["mpi4py", "gloo"])
def test_ranks_talk_through_a_backend(name):
    everybody = BackendCommunicator(range(WORLD.size), name)
    assert everybody.allgather((everybody.rank, "x" * everybody.rank)) == [
        (rank, "x" * rank) for rank in range(WORLD.size)
    ]
    own = BackendCommunicator([WORLD.rank], name)
    assert own.allreduce(WORLD.rank) == WORLD.rank
    last = [WORLD.size - 1, 0] if WORLD.size > 1 else [0]
    for comm in (everybody.duplicate(), everybody.subset(range(WORLD.size)), everybody):
        total = comm.all_reduce(torch.tensor([comm.rank + 1.0]))
        assert total.item() == WORLD.size * (WORLD.size + 1) / 2
    if WORLD.rank in last:
        assert everybody.subset(sorted(last)).allreduce(1) == len(last)


def test_gradients_are_averaged_through_the_group(monkeypatch):
    comm = BackendCommunicator(range(WORLD.size), "mpi4py")
    used = []
    reduce = type(comm._gloo)._all_reduce
    monkeypatch.setattr(
        type(comm._gloo),
        "_all_reduce",
        lambda group, *args: used.append(group) or reduce(group, *args),
    )
    grad = torch.full((3,), float(WORLD.rank), dtype=torch.float64)
    average_([grad], comm, WORLD.size)
    assert torch.equal(grad, torch.full_like(grad, (WORLD.size - 1) / 2))
    if WORLD.size > 1:
        assert set(used) == {comm._gloo}


def test_groups_of_the_same_ranks_keep_apart():
    start("mpi4py")
    first, second = (new_group("mpi4py", range(WORLD.size)) for _ in range(2))
    assert first.group_name != second.group_name
    values = torch.ones(2)
    dist.all_reduce(values, group=second)
    assert values.tolist() == [WORLD.size] * 2


def test_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="unknown backend mpi, must be one of mpi4py, gloo, nccl"):
        start("mpi")
    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match="nccl needs GPUs, but PyTorch has no collectives for"):
            start("nccl")
