from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from spatialdl.comm.groups import new_group, start
from tests.mpi.device import DEVICE

pytestmark = pytest.mark.usefixtures("ends_process_group")
WORLD = MPI.COMM_WORLD


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
