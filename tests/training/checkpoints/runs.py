"""Runs of a very small network in this process, and checkpoints made by hand."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor, nn

from spatialdl.training.checkpoints.folder import CONTENT, RANDOM, sealed, stage_file
from spatialdl.training.checkpoints.reading import FORMAT, sha256
from spatialdl.training.trainer import Trainer
from tests import fitting
from tests.composing import composed

TINY = [
    *("++model._target_=tests.training.checkpoints.runs.network", "~model.width"),
    *("data.image_size=[9,8]", "data.num_classes=3", "data.samples=10", "data.batch_size=4"),
    *("data.validation_samples=3", "trainer.precision=float64", "trainer.max_steps=8"),
    *("trainer.checkpoint.every_steps=99", "device=cpu"),
]


def network(num_classes: int = 3, in_channels: int = 3, hidden: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, hidden, 3),
        nn.BatchNorm2d(hidden),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(hidden, num_classes),
    )


class Noise(nn.Module):
    """Draws from the global generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.random() + float(np.random.random()))


def noisy(num_classes: int = 3, in_channels: int = 3) -> nn.Sequential:
    return nn.Sequential(Noise(), *network(num_classes, in_channels))


def config(*overrides: str) -> DictConfig:
    return composed("train", *TINY, *overrides)


def train(run_dir: Path, *overrides: str) -> Trainer:
    return fitting.train(run_dir, *TINY, *overrides)


def losses(run_dir: Path) -> list[float]:
    return json.loads((run_dir / "summary.json").read_text())["loss"]


def table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def checkpoints(run_dir: Path) -> list[int]:
    """The steps of those that are there."""
    found = (run_dir / "checkpoints").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in found)


TENSORS = {"0.weight": torch.arange(12.0).view(4, 3), "1.steps": torch.tensor(7)}


def made(folder: Path, at: int = 3, stages: int = 1, **changes: Any) -> Path:
    """Checkpoint with changed and resealed content."""
    path = folder / f"step-{at:08d}"
    path.mkdir(parents=True)
    for stage in range(stages):
        save_file(TENSORS, path / stage_file(stage))
    places = {f"{place}/torch": torch.full((2,), place) for place in (0, 1, 10, 11)}
    save_file(places, path / RANDOM)
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in path.iterdir()
    }
    content = {
        **{"format": FORMAT, "step": at, "files": files, "config": {}, "identity": {}},
        "versions": {"spatialdl": "1.2.3"},
        "layout": {"parallel": "none", "placement": "1 rank"},
        "update": {"scheduler_steps": at, "scaler": None},
    }
    for key, value in changes.items():
        inner = content
        *groups, last = key.split("__")
        for group in groups:
            inner = inner[group]
        inner[last] = value
    (path / CONTENT).write_text(sealed(content))
    return path
