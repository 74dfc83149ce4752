"""A network that is quick to train, with a part that frozen layers come before; losses; runs."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.fitting import fit
from tests.mpi.device import device_key


def trained(run_dir: Path, comm: Communicator, *words: str) -> tuple[Trainer, dict[str, Any]]:
    """A run of the ranks of `comm`, and its summary on rank 0, if it came to its end."""
    return run_of(composed("train", *words, device_key(comm), "comm.check=true"), run_dir, comm)


def run_of(config: Any, run_dir: Path, comm: Communicator) -> tuple[Trainer, dict[str, Any]]:
    trainer = Trainer(config, comm)
    fit(trainer, run_dir)
    file = run_dir / "summary.json"
    is_there = comm.rank == 0 and file.exists()
    return trainer, json.loads(file.read_text()) if is_there else {}


def written_once(folders: pytest.TempPathFactory, write: Callable[[Path], object]) -> Path:
    """A new folder that all ranks see, in which the first has written."""
    world = MPI.COMM_WORLD
    folder: Path = world.bcast(folders.mktemp("written") if world.rank == 0 else None)
    if world.rank == 0:
        write(folder)
    world.Barrier()
    return folder


def small(num_classes: int, in_channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 4, 5, stride=2, padding=2, bias=False),
            bn1=nn.BatchNorm2d(4),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(4, 6, 3, stride=2, padding=1),
            bn2=nn.BatchNorm2d(6),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(6, 6, 3, padding=1),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(6, num_classes),
        )
    )


def focal(output: Tensor, target: Tensor, gamma: float = 0.0) -> Tensor:
    """A loss of a user's, for images."""
    log = F.log_softmax(output, 1).gather(1, target.unsqueeze(1)).squeeze(1)
    return -((1 - log.exp()) ** gamma * log).mean()


class Overlap(nn.Module):
    """One for pixels, which is no mean over them: what slices there are tells."""

    weights: Tensor

    def __init__(self, weights: list[float], power: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))
        self.power = power

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        shares, losses = output.softmax(1), []
        known = (target != 255).to(output.dtype)
        for number, weight in enumerate(self.weights):
            share, is_class = shares[:, number] * known, (target == number).to(output.dtype)
            both, either = (share * is_class).sum(), (share + is_class).sum()
            losses.append(weight * (1 - (2 * both + 1) / (either + 1)) ** self.power)
        return torch.stack(losses).mean()
