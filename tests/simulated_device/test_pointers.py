"""Addresses that a transport is given by mistake: the fault ends the job, or names the memory."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from tests.simulated_device.collectives import SimGroup
from tests.simulated_device.ranks import two_ranks_ran

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
        "world.all_reduce(torch.ones(3, device=device))",
        "step(split, 'gpipe')",
        "step(stages, '1f1b')",
    ],
    ids=["sum", "halo", "hand-over"],
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
