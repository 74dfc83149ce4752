"""Addresses that a transport is given by mistake: the fault ends the job, or names the memory."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from tests.simulated_device.collectives import SimGroup
from tests.simulated_device.ranks import SECONDS, two_ranks_ran

slow = pytest.mark.slow
PLANTED = """
from functools import partial
from spatialdl.comm.device_transport import DeviceAware
from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.exchange_strategies import by_messages

def not_staged(comm):
    return DeviceAware(comm, comm._add, comm.gather_into, partial(by_messages, comm))

MpiCommunicator._on_device = property(not_staged)
print("planted", flush=True)
"""


@pytest.mark.parametrize(
    "travels",
    [
        pytest.param("world.all_reduce(torch.ones(3, device=device))", id="sum", marks=slow),
        pytest.param("step(split, 'gpipe')", id="halo"),
        pytest.param("step(stages, '1f1b')", id="hand-over", marks=slow),
    ],
)
def test_a_device_pointer_that_is_given_to_mpi_faults(travels: str) -> None:
    """Tensors go to an MPI that is not device-aware as they go to one that is."""
    code, said = two_ranks_ran(f"{travels}\n{PLANTED}\n{travels}\nprint('not reached')", "host")
    assert said.count("planted") == 2, said
    assert code != 0, said
    assert "not reached" not in said
    assert "Segmentation fault" in said or "Bad address" in said, said


@pytest.mark.parametrize("kind", ["other", "pinned host", "device 1"])
def test_a_collective_refuses_memory_that_is_not_of_its_device(kind: str) -> None:
    group = SimGroup(HashStore(), 0, 1, timedelta(seconds=30))  # type: ignore[no-untyped-call]
    own = torch.ones(3, device="sim")
    group.allreduce([own]).wait()
    values = {
        "other": torch.ones(3),
        "pinned host": torch.ones(3).pin_memory(),
        "device 1": torch.ones(3, device="sim:1"),
    }[kind]
    with pytest.raises(RuntimeError, match=f"a collective was given memory of: {kind}"):
        group.allreduce([values])
    with pytest.raises(RuntimeError, match="not contiguous"):
        group.allreduce([torch.ones(2, 3, device="sim").T])


A_SUM_ON_ONE_RANK = """
alone = world.duplicate()
alone.all_reduce(torch.ones(3, device=device))
step(split, "gpipe")
def sum_alone(*_):
    alone.all_reduce(torch.ones(3, device=device))
step(split, "gpipe", sum_alone if world.rank == 0 else None)
"""
ONE_LANE = """
step(stages, "1f1b")
made = Handovers.__init__
def shared(self, *arguments):
    made(self, *arguments)
    self._lanes = {key: self._lanes[*key[:2], "forward", key[3]] for key in self._lanes}
Handovers.__init__ = shared
step(stages, "1f1b")
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(A_SUM_ON_ONE_RANK, id="a sum on one rank", marks=slow),
        pytest.param(ONE_LANE, id="one lane for both directions"),
    ],
)
def test_a_hang_on_the_device_is_named(program: str) -> None:
    code, said = two_ranks_ran(program, "nccl")
    assert said.count("a step has ended") >= 2, said  # only the one with the loss waits
    assert code != 0
    assert re.search(r"rank \d on .*waits for \d+ s in the end of the step", said), said
    assert f"longer than comm.timeout={SECONDS}" in said, said
