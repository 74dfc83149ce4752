"""Ranks of the synthetic benchmark: training steps of a configuration on one batch.

Rank 0 prints a line per round, and writes a JSON file: seconds of each round, images per step,
ranks, and the peak memory of the largest rank.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from spatialdl.bench.device import Stopwatch, describe
from spatialdl.comm import check
from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import choose_device_path, device_of
from spatialdl.comm.launch import TERMINAL, end_with_launcher, launched
from spatialdl.comm.world import start_world
from spatialdl.commands.start import choose_device
from spatialdl.training.parts import RunParts
from spatialdl.training.peak_memory import peak_memory_mb


def main() -> None:
    install_abort_hook()
    end_with_launcher()
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("found", type=Path)
    for name in ("warmup", "rounds", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    config = OmegaConf.load(options.config)
    assert isinstance(config, DictConfig)
    OmegaConf.set_struct(config, True)
    info = launched()
    if info is not None:
        choose_device(config, info)
    world = start_world(str(config.comm.transport))
    choose_device_path(world, device_of(config.device), str(config.comm.device_path))
    found = measure(config, options, world)
    if world.rank == 0:
        options.found.write_text(json.dumps(found))


def measure(config: DictConfig, options: argparse.Namespace, world: Communicator) -> dict[str, Any]:
    """Time `options.rounds` rounds of `options.steps` steps, after `options.warmup` steps."""
    check.enable(bool(config.comm.check))
    total = options.warmup + options.rounds * options.steps
    parts = RunParts(_settled(config, total), world)
    loader = parts.train_loader
    batch = loader.microbatches(next(iter(loader.batches())))
    images = loader.samples(0)

    def steps(first: int, count: int) -> Iterator[int]:
        for number in range(first, first + count):
            parts.pipeline.train_step(batch, number, parts.update.scale)
            parts.update.step()
            yield number

    rounds: list[float] = []
    watch = Stopwatch(parts.device)
    is_shown = world.rank == 0 and (os.isatty(2) or TERMINAL in os.environ)
    with tqdm(total=total, desc="steps", unit="step", leave=False, disable=not is_shown) as bar:
        for _ in steps(0, options.warmup):
            bar.update()
        for number in range(options.rounds):
            world.barrier()
            watch.start()
            for _ in steps(options.warmup + number * options.steps, options.steps):
                bar.update()
            rounds.append(max(world.allgather(watch.stop())))
            rate = images * options.steps / rounds[-1] / world.size
            if world.rank == 0:
                bar.write(f"round {number + 1}: {rate:.2f} img/sec per rank")
    loader.close()
    memory = world.gather(peak_memory_mb(parts.device)) or [0.0]
    return {
        "rounds": rounds,
        "images": images,
        "ranks": world.size,
        "memory_mb": max(memory),
        "device": describe(parts.device),
    }


def _settled(config: DictConfig, steps: int) -> DictConfig:
    """Set the number of steps, for schedulers, and data sets to one batch."""
    config.trainer.max_steps, config.trainer.max_epochs = steps, None
    if config.data.name != "shards":
        config.data.samples = int(config.data.batch_size) * int(config.trainer.accumulate)
        config.data.validation_samples = 0
    return config


if __name__ == "__main__":
    main()
