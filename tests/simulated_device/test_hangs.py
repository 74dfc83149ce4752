"""Ranks whose devices wait for each other for ever: the job ends and names what hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from spatialdl.comm.launch import mpiexec_command
from tests.simulated_device.programs import ROOT

SECONDS = 5
START = f"""
import torch
from torch import nn
from spatialdl.comm import limit
from spatialdl.comm.world import start_world
limit.limit_waits({SECONDS})
world = start_world("mpi")
from tests.mpi.device import put_on
device = put_on(world)
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.handovers import Handovers
from spatialdl.pipeline.placed import Microbatch
from spatialdl.pipeline.runtime import Pipeline, PipelineOptions
from spatialdl.pipeline.schedule import make_schedule

def step(placement, schedule, hook=None):
    schedule = make_schedule(schedule, placement, 4)
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 1))
    options = PipelineOptions(cut=["1"] if placement.stages > 1 else None, device=device)
    loss = lambda output, target: output.square().mean()
    pipeline = Pipeline(model, placement, schedule, world, loss, (3, 8, 6), options)
    if hook:
        pipeline.stages[0].register_forward_hook(hook)
    height = 8 // placement.widths[0]
    tiles = [torch.ones(1, 3, height, 6, device=device) for _ in range(4)]
    pipeline.train_step([Microbatch(1, 0.25, tile, tile) for tile in tiles], 0)
    print("a step has ended", flush=True)

split, stages = Placement(1, ((2, 1),)), Placement(1, ((1, 1), (1, 1)))
"""
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
    self._lanes = {key: self._lanes[*key[:2], "forward"] for key in self._lanes}
Handovers.__init__ = shared
step(stages, "1f1b")
"""


@pytest.mark.parametrize(
    "program",
    [A_SUM_ON_ONE_RANK, ONE_LANE],
    ids=["a sum on one rank", "one lane for both directions"],
)
def test_a_hang_on_the_device_is_named(program: str) -> None:
    place = {"SPATIALDL_DEVICE": "sim", "SPATIALDL_DEVICE_PATH": "nccl", "SIM_DEVICES": "2"}
    run = subprocess.run(
        [*mpiexec_command(2), sys.executable, "-c", START + program],
        check=False,
        cwd=ROOT,
        env=os.environ | place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = run.stdout + run.stderr
    assert said.count("a step has ended") >= 2, said  # only the one with the loss waits
    assert run.returncode != 0
    assert re.search(r"rank \d on .*waits for \d+ s in the end of the step", said), said
    assert f"longer than comm.timeout={SECONDS}" in said, said
