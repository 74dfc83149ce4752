"""Ranks of the benchmark `layouts`: training steps of one configuration on one batch."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from benchmarks.harness import Stopwatch, describe
from spatialdl.cli.start import choose_device
from spatialdl.comm import check, trace
from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import choose_device_path, device_of
from spatialdl.comm.launch import end_with_launcher, launched
from spatialdl.comm.world import start_world
from spatialdl.pipeline.simulate import actions_of, measured_costs, simulate
from spatialdl.training.parts import RunParts
from spatialdl.training.peak_memory import peak_memory_mb


def main(words: Sequence[str]) -> None:
    """Be a rank: measure a configuration; rank 0 writes the file."""
    install_abort_hook()
    end_with_launcher()
    given, found, counts = words
    config = OmegaConf.load(given)
    assert isinstance(config, DictConfig)
    OmegaConf.set_struct(config, True)
    info = launched()
    if info is not None:
        choose_device(config, info)
    world = start_world(str(config.comm.transport))
    choose_device_path(world, device_of(config.device), str(config.comm.device_path))
    result = measure(config, argparse.Namespace(**json.loads(counts)), world)
    if world.rank == 0:
        Path(found).write_text(json.dumps(result))


def measure(config: DictConfig, options: argparse.Namespace, world: Communicator) -> dict[str, Any]:
    """Time rounds of steps after a warm-up, and of stages one traced step per round."""
    check.enable(bool(config.comm.check))
    staged = int(config.parallel.stages) > 1
    total = options.warmup + options.rounds * (options.steps + staged)
    parts = RunParts(_settled(config, total), world)
    loader = parts.train_loader
    batch = loader.microbatches(next(iter(loader.batches())))
    watch, numbers = Stopwatch(parts.device), itertools.count()

    def step() -> None:
        parts.pipeline.train_step(batch, next(numbers), parts.update.scale)
        parts.update.step()

    def seconds(steps: int) -> float:
        world.barrier()
        watch.start()
        for _ in range(steps):
            step()
        return watch.stop()

    for _ in range(options.warmup):
        step()
    rounds: list[float] = []
    ideal: list[tuple[float, float]] = []
    held = 0
    for number in range(options.rounds):
        rounds.append(max(world.allgather(seconds(options.steps))))
        rate = loader.samples(0) * options.steps / rounds[-1] / world.size
        if world.rank == 0:
            print(f"round {number + 1}: {rate:.2f} img/sec per rank", flush=True)
        if staged:
            best, took, held = _ideal(parts, world, seconds)
            ideal.append((best, took))
    loader.close()
    return {
        **{"rounds": rounds, "ideal": ideal, "held": held, "images": loader.samples(0)},
        **{"ranks": world.size, "device": describe(parts.device)},
        "memory_mb": max(world.allgather(peak_memory_mb(parts.device))),
    }


def _ideal(
    parts: RunParts, world: Communicator, seconds: Callable[[int], float]
) -> tuple[float, float, int]:
    """Simulated and measured seconds of a step, and held micro-batches.

    On an accelerator the step synchronises after each action: the stream only, as an all-reduce
    may wait for ranks that wait for this one.
    """
    if parts.device.type == "cpu":
        trace.start()
    else:
        trace.start(torch.accelerator.current_stream(parts.device).synchronize)
    took = seconds(1)
    spans = world.allgather(trace.stop())
    placement, schedule = parts.pipeline.placement, parts.pipeline.schedule
    ranks = [actions_of(rank, placement, schedule.train) for rank in placement.replica_ranks(0)]
    costs = measured_costs([spans[rank] for rank in placement.replica_ranks(0)], placement.stages)
    timeline = simulate(ranks, costs)
    return timeline.seconds, max(world.allgather(took)), max(timeline.peak_held)


def _settled(config: DictConfig, steps: int) -> DictConfig:
    """Set the number of steps, for schedulers, and data sets to one batch."""
    config.trainer.max_steps, config.trainer.max_epochs = steps, None
    if config.data.name != "shards":
        config.data.samples = int(config.data.batch_size) * int(config.trainer.accumulate)
        config.data.validation_samples = 0
    return config


if __name__ == "__main__":
    main(sys.argv[1:])
