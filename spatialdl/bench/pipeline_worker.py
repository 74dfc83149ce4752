"""Ranks of the pipeline benchmark: steps of one network in several layouts.

Rank 0 prints one line of JSON: by layout, seconds of each step, and the simulated time from the
measured times of its actions.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from spatialdl import models
from spatialdl.bench.device import Stopwatch, describe, take_device, worker_options
from spatialdl.bench.pipeline import NamedLayout, layouts
from spatialdl.comm import trace
from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import choose_device_path
from spatialdl.comm.world import start_world
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.simulate import actions_of, measured_costs, simulate
from spatialdl.pipeline.stage_runtime import Microbatch

CLASSES = 10


def main() -> None:
    install_abort_hook()
    options = worker_options()
    device = take_device(options.device)
    world = start_world()
    choose_device_path(world, device)
    sides = [
        PipelineVariant(one, options, world, device)
        for one in layouts(world.size, options.microbatches)
    ]
    steps = len(sides) * (1 + options.rounds)
    with tqdm(total=steps, desc="steps", unit="step", disable=world.rank != 0) as progress:
        for side in sides:  # the first step allocates memory and chooses exchange strategies
            side.step(0)
            progress.update()
        draw = random.Random(0)  # the same order on all ranks
        for step in range(1, options.rounds + 1):
            for side in draw.sample(sides, len(sides)):
                side.measure(step)
                progress.update()
    if world.rank == 0:
        found = {side.layout.name: side.found for side in sides}
        print(json.dumps({"device": describe(device), "layouts": found}))


class PipelineVariant:
    """The pipeline of one layout, on all ranks."""

    def __init__(
        self,
        layout: NamedLayout,
        options: argparse.Namespace,
        world: Communicator,
        device: torch.device,
    ) -> None:
        self.layout, self._world, self._device = layout, world, device
        self._watch = Stopwatch(device)
        torch.manual_seed(0)
        model = getattr(models, options.model)(num_classes=CLASSES)
        size = (3, options.size, options.size)
        self.pipeline = PipelineRuntime(
            model,
            layout.placement,
            layout.schedule,
            world,
            F.cross_entropy,
            size,
            PipelineOptions(device=device),
        )
        self._optimizer = torch.optim.SGD(self.pipeline.parameters(), lr=0.01, momentum=0.9)
        images = torch.randn(1, *size, generator=torch.Generator().manual_seed(0)).to(device)
        target = torch.zeros(1, dtype=torch.int64, device=device)
        count = layout.schedule.microbatches
        self._batch = [Microbatch(1, 1 / count, images, target) for _ in range(count)]
        self.found: dict[str, Any] = {"seconds": [], "ideal": [], "images": count}

    def step(self, number: int) -> None:
        self.pipeline.train_step(self._batch, number)
        self._optimizer.step()

    def measure(self, number: int) -> None:
        """Measure one step, and simulate it without waits from the times of its actions.

        On an accelerator, actions are timed in another step that synchronises after each.
        """
        is_cpu = self._device.type == "cpu"
        if is_cpu:
            trace.start()
        seconds = self._timed(number)
        if not is_cpu:
            # the stream only: an all-reduce may wait for ranks that wait for this one
            trace.start(torch.accelerator.current_stream(self._device).synchronize)
            self._timed(number)
        of_ranks = self._world.gather((seconds, trace.stop()))
        if of_ranks is None:
            return
        placement, train = self.layout.placement, self.layout.schedule.train
        ranks = [actions_of(rank, placement, train) for rank in range(self._world.size)]
        timeline = simulate(
            ranks, measured_costs([spans for _, spans in of_ranks], placement.stages)
        )
        self.found["seconds"].append(max(seconds for seconds, _ in of_ranks))
        self.found["ideal"].append(timeline.seconds)
        self.found["held"] = max(timeline.peak_held)

    def _timed(self, number: int) -> float:
        """Seconds of a step on this rank."""
        self._world.barrier()
        self._watch.start()
        self.step(number)
        return self._watch.stop()


if __name__ == "__main__":
    main()
