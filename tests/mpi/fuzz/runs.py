"""A case as the training command runs it, on all ranks, and its comparison with one process."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.common.configuring.own_keys import fit_model_keys, rewritten
from spatialdl.data.writer import ShardWriter
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.training.checkpoints.content import copies
from spatialdl.training.checks import check_config
from spatialdl.training.trainer import Trainer
from tests.fitting import fit
from tests.mpi.fuzz.cases import CLASSES, Case
from tests.mpi.fuzz.reference import Data, Outcome, state_of

TOLERANCE = 1e-10
METRICS = ("loss", "accuracy")
ALWAYS = [
    *("model._target_=tests.mpi.fuzz.networks.network", "data=shards", "data.workers=0"),
    *("trainer.precision=float64", "device=cpu", "trainer.report=false"),
    *("trainer.checkpoint.keep=0", "comm.check=false"),
]


def write(folder: Path, case: Case, data: Data) -> list[str]:
    """The data set of a case on disk, as the command reads it."""
    name = case.task["name"]
    classes = [f"class{number}" for number in range(CLASSES)]
    halves = (
        ("train", data.images, data.targets),
        ("val", data.validation_images, data.validation_targets),
    )
    rows = []
    with ShardWriter(
        folder / "set",
        classes if name != "regression" else (),
        kind="volumes" if case.dims == 3 else "tiles",
    ) as writer:
        for split, images, targets in halves:
            for image, target in zip(images, targets, strict=True):
                label = int(target) if name == "classification" else None
                mask = target if name == "segmentation" else None
                writer.add(image, label, split, mask=mask)
                rows.append(target)
    words = [f"data.path={folder / 'set'}"]
    if name in ("multilabel", "regression"):
        file = folder / "targets.csv"
        with file.open("w", newline="") as lines:
            table = csv.writer(lines)
            table.writerow(["sample", *classes])
            for number, row in enumerate(rows):
                table.writerow([number, *("" if np.isnan(x) else x for x in row)])
        words.append(f"data.targets={file}")
    return words


def composed(case: Case, words: list[str]) -> DictConfig:
    """The configuration, as the command makes it."""
    arguments = [
        rewritten(word)
        for word in (
            *(*ALWAYS, *words, *case.overrides(), f"data.batch_size={case.batch}"),
            *(f"trainer.max_steps={case.steps}", f"trainer.validate_every={case.steps}"),
        )
    ]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", arguments)
    check_config(config)
    fit_model_keys(config, arguments)
    return config


def trained(case: Case, world: Communicator, folder: Path, data: Data) -> Outcome:
    """Train as the command does; every rank calls it."""
    config = None
    if world.rank == 0:  # alone, as composing takes longer than training
        config = composed(case, write(folder, case, data))
    config = world.bcast(config)
    trainer = Trainer(config, world)
    fit(trainer, folder / "run")
    if case.parallel["shard_state"]:  # of which a rank alone knows nothing
        own = copies(trainer.parts.pipeline, trainer.parts.update, world.rank).values()
        state: dict[str, Tensor] = {name: value for one in own for name, value in one.items()}
    else:
        state = held(trainer.parts.pipeline, trainer.parts.update.optimizer)
        averages = trainer.parts.update.average.state_dict() if trainer.parts.update.average else {}
        state |= {f"average/{name}": value for name, value in averages.items()}
    run = Path(world.bcast(folder)) / "run"
    with (run / "metrics.csv").open(newline="") as lines:
        losses = [float(row["loss"]) for row in csv.DictReader(lines)]
    with (run / "validation.csv").open(newline="") as lines:
        *_, metrics = csv.DictReader(lines)
    return Outcome(losses, state, {key: float(metrics[key]) for key in METRICS if key in metrics})


def held(pipeline: PipelineRuntime, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state of the stages of this rank."""
    stages = [state_of(stage, optimizer) for stage in pipeline.stages.values()]
    return {name: value for one in stages for name, value in one.items()}


def differences(ours: Outcome, plain: Outcome | None, world: Communicator) -> dict[str, float]:
    """By how much numbers of any rank differ, by name; of what one side has alone infinite.

    Args:
        ours: with the state that this rank holds.
        plain: on rank 0.
    """
    plain = world.bcast(plain)
    found = {
        name: float((value.double() - plain.state[name].double()).abs().max())
        for name, value in ours.state.items()
        if name in plain.state
    }
    for number, (one, two) in enumerate(zip(ours.losses, plain.losses, strict=True)):
        found[f"loss of step {number + 1}"] = abs(one - two)
    for name, value in plain.metrics.items():
        found[f"metric {name}"] = abs(ours.metrics[name] - value)
    worst: dict[str, float] = {}
    for one in world.allgather({**dict.fromkeys(ours.state, math.inf), **found}):
        for name, by in one.items():  # NaN is as far as can be
            worst[name] = max(worst.get(name, 0.0), by if by >= 0 else math.inf)
    return {**dict.fromkeys(plain.state, math.inf), **worst}
