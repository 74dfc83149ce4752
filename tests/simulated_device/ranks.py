"""Training steps of two ranks in processes of their own, with a fault that ends them."""

from __future__ import annotations

import os
import subprocess
import sys

from spatialdl.comm.launch import mpiexec_command
from tests.simulated_device.programs import ROOT

SECONDS = 5
"""How long ranks wait for each other."""

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
    """Run lines on two ranks with a device each, whose tensors take a `comm.device_path`.

    Args:
        program: lines of Python; they find step, split, stages, world, device and torch.

    Returns:
        The exit code and all output; each rank prints "a step has ended" after each step.
    """
    place = {"SPATIALDL_DEVICE": "sim", "SPATIALDL_DEVICE_PATH": path, "SIM_DEVICES": "2"}
    run = subprocess.run(
        [*mpiexec_command(2), sys.executable, "-c", START + program],
        check=False,
        cwd=ROOT,
        env=os.environ | place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return run.returncode, run.stdout + run.stderr
