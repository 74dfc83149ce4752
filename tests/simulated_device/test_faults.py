"""Faults that end a process, or name what is wrong: what touches device memory, and who hangs."""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from spatialdl.comm.launch import mpiexec_command
from tests.processes import ended
from tests.simulated_device.collectives import SimGroup

ROOT = Path(__file__).resolve().parents[2]
slow = pytest.mark.slow


LOADED = """
import ctypes, os, sys
import torch
from mpi4py import MPI
from tests import simulated_device
simulated_device.load()
x = torch.ones(4096, dtype=torch.float64, device="sim")
torch.sim.synchronize()
print("loaded", flush=True)
"""
READ_BY_MPI = """
memory, into = MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), bytearray(x.nbytes)
MPI.COMM_SELF.Sendrecv(memory, 0, 0, into, 0, 0)
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("ctypes.string_at(x.data_ptr(), 1)", id="the host reads"),
        pytest.param("ctypes.memset(x.data_ptr(), 0, 1)", id="it writes", marks=slow),
        pytest.param(READ_BY_MPI, id="MPI reads"),
    ],
)
def test_a_process_ends_where_the_host_touches_memory_of_the_device(program: str) -> None:
    done = ended([sys.executable, "-c", f"{LOADED}{program}\nprint('reached')"], ROOT)
    assert done.returncode != 0
    assert done.stdout == "loaded\n", done.stderr


SECONDS = 5
"""How long ranks wait for each other."""

STEPS = f"""
import torch
from torch import nn
from spatialdl.comm import waiting
from spatialdl.comm.world import start_world
waiting.limit_waits({SECONDS})
world = start_world("mpi")
from tests.mpi.device import put_on
device = put_on(world)
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.handovers import Handovers
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule

def step(placement, schedule, hook=None):
    schedule = make_schedule(schedule, placement, 4)
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 1))
    options = PipelineOptions(cut=["1"] if placement.stages > 1 else None, device=device)
    loss = lambda output, target: output.square().mean()
    pipeline = PipelineRuntime(model, placement, schedule, world, loss, (3, 8, 6), options)
    if hook:
        pipeline.stages[0].register_forward_hook(hook)
    height = 8 // placement.widths[0]
    tiles = [torch.ones(1, 3, height, 6, device=device) for _ in range(4)]
    pipeline.train_step([Microbatch(1, 0.25, tile, tile) for tile in tiles], 0)
    print("a step has ended", flush=True)

split, stages = Placement(1, ((2, 1),)), Placement(1, ((1, 1), (1, 1)))
"""


def two_ranks_ran(program: str, path: str) -> tuple[int, str]:
    """The exit code and output of lines on two ranks with a device each.

    Args:
        program: lines of Python; they find step, split, stages, world, device and torch.
        path: `comm.device_path` of their tensors.
    """
    place = {"SPATIALDL_DEVICE": "sim", "SPATIALDL_DEVICE_PATH": path, "SIM_DEVICES": "2"}
    words = [*mpiexec_command(2), sys.executable, "-c", STEPS + program]
    done = ended(words, ROOT, 120, **place)
    return done.returncode, done.stdout + done.stderr


NOT_STAGED = """
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
    code, said = two_ranks_ran(f"{travels}\n{NOT_STAGED}\n{travels}\nprint('not reached')", "host")
    assert said.count("planted") == 2, said
    assert code != 0, said
    assert "not reached" not in said
    assert "Segmentation fault" in said or "Bad address" in said, said


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


def test_a_collective_refuses_memory_that_is_not_of_its_device() -> None:
    group = SimGroup(HashStore(), 0, 1, timedelta(seconds=30))  # type: ignore[no-untyped-call]
    own = torch.ones(3, device="sim")
    group.allreduce([own]).wait()
    for values, said in (
        (torch.ones(3), "given memory of: other"),
        (torch.ones(3).pin_memory(), "given memory of: pinned host"),
        (torch.ones(3, device="sim:1"), "given memory of: device 1"),
        (torch.ones(2, 3, device="sim").T, "not contiguous"),
    ):
        with pytest.raises(RuntimeError, match=f"a collective was {said}|{said}"):
            group.allreduce([values])
