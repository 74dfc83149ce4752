"""Devices and ranks with Lightning, and the error if Lightning is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.integrations import lightning_ranks
from spatialdl.integrations.lightning_ranks import (
    StartedProcesses,
    StartedRanks,
    check_devices,
    device_for,
)

CPU = torch.device("cpu")


def cuda(*places: int) -> list[torch.device]:
    return [torch.device("cuda", place) for place in places]


def test_ranks_are_those_of_the_launcher(monkeypatch):
    for name, value in {"RANK": 5, "SIZE": 8, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    ranks = StartedRanks()
    assert (ranks.global_rank(), ranks.world_size(), ranks.local_rank()) == (5, 8, 1)
    assert ranks.creates_processes_externally
    assert ranks.launcher == "mpiexec"


class TwoNodes(SingleProcess):
    rank, size = 4, 6

    def nodes(self) -> list[int]:
        return [0, 1, 0, 1, 1, 0]  # ranks go round the nodes, but for two


def test_machines_are_numbered():
    ranks = StartedRanks()
    ranks.find_nodes(TwoNodes())
    assert (ranks.node_rank(), ranks.local_rank()) == (1, 2)


@pytest.mark.parametrize(
    ("given", "nodes", "size"),
    [([CPU], 1, 4), ([CPU] * 2, 2, 4), ([CPU], 2, 4), ([CPU], 1, 1), (cuda(0, 1, 2), 1, 2)],
)
def test_devices_that_fit_the_ranks(given, nodes, size, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    check_devices(given, nodes, size, "mpiexec")


@pytest.mark.parametrize(
    ("given", "nodes", "size", "message"),
    [
        ([CPU] * 4, 2, 4, r"Trainer\(devices=4, num_nodes=2\) needs 4 x 2 = 8 .* started 4"),
        (cuda(0, 1), 1, 3, "2 x 1 = 2 processes, but srun started 3"),
        ([CPU], 3, 4, r"Trainer\(num_nodes=3\) needs a multiple of 3 processes"),
    ],
)
def test_devices_that_contradict_the_ranks(given, nodes, size, message, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    with pytest.raises(ValueError, match=message):
        check_devices(given, nodes, size, "srun")


@pytest.mark.parametrize(
    ("given", "local_rank", "expected"),
    [(cuda(0), 2, 2), (cuda(0, 1, 2), 1, 1), (cuda(2, 0), 0, 2), (cuda(2), 1, 2), ([CPU], 3, None)],
)
def test_a_rank_takes_a_device_of_its_own(given, local_rank, expected, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(lightning_ranks, "current_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(lightning_ranks, "take_device", taken.append)
    device_for(local_rank, given)
    assert taken == ([] if expected is None else [expected])
    if len(given) > 1:
        with pytest.raises(ValueError, match="rank 3 of this machine has no device"):
            device_for(3, given)


def test_what_fails_is_noted():
    processes = StartedProcesses()
    assert processes.launch(lambda x, y: x + y, 1, y=2, trainer=None) == 3
    with pytest.raises(KeyboardInterrupt):
        processes.launch(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert processes.failed
    processes.launch(lambda: None)
    assert not processes.failed


def test_without_lightning_the_message_says_what_to_install():
    code = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if "lightning" in name else found(name, *a)
import spatialdl.integrations.lightning
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.splitlines()[-1].startswith("ImportError: spatialdl.integrations.lightning")
    assert 'pip install "spatialdl[lightning]"' in done.stderr
