"""A run in this process, which those on nodes are to equal."""

from __future__ import annotations

from pathlib import Path

from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.training.checkpoints.runs import losses


def losses_alone(run_dir: Path, *words: str) -> list[float]:
    Trainer(composed("train", *words), SingleProcess()).fit(run_dir)
    return losses(run_dir)
