"""A run in this process, which those on nodes are to equal."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_module

from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.trainer import Trainer
from tests.training.checkpoints.runs import losses


def losses_alone(run_dir: Path, *words: str) -> list[float]:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        Trainer(compose("train", [*words]), SingleProcess()).fit(run_dir)
    return losses(run_dir)
