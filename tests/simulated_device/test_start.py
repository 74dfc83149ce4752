"""What a rank has of its device before MPI is initialised."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from spatialdl.bench import device
from spatialdl.comm.launch import LaunchInfo
from spatialdl.commands import start

CONFIG = {"device": "auto", "comm": {"ranks_per_device": 1, "timeout": None, "transport": "mpi"}}


def allocations(index: int) -> int:
    """Since the device was made: without any, CUDA has no context."""
    return int(torch.accelerator.memory.memory_stats(index)["allocation.all.allocated"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_has_a_context_before_mpi_starts(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rank 0 too, whose device is the current one from the beginning."""
    info, before = LaunchInfo(rank, 2, rank, "mpiexec"), allocations(rank)
    monkeypatch.setattr(start.run_log, "start_log", lambda rank: None)
    monkeypatch.setattr(start, "limit_waits", lambda seconds: None)

    def start_world(transport: str) -> None:
        assert torch.accelerator.current_device_index() == rank
        assert allocations(rank) > before
        raise InterruptedError

    monkeypatch.setattr(start, "start_world", start_world)
    with pytest.raises(InterruptedError):
        start.join_ranks(info, OmegaConf.create(CONFIG), lambda config: pytest.fail("too far"))


@pytest.mark.parametrize("rank", [0, 1])
def test_so_it_has_in_benchmarks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = allocations(rank)
    monkeypatch.setattr(device, "launched", lambda: LaunchInfo(rank, 2, rank, "mpiexec"))
    assert device.take_device("auto") == torch.device("sim", rank)
    assert allocations(rank) > before
