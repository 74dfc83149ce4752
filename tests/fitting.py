"""Training in this process, as tests do it that do not look at pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.training import report, run_directory
from spatialdl.training.parts import RunParts
from spatialdl.training.trainer import Trainer
from tests.composing import composed


def make_trainer(*words: str) -> Trainer:
    """That of a run in one process."""
    return Trainer(composed("train", *words), SingleProcess())


def train(run_dir: Path, *words: str) -> Trainer:
    """A run in one process."""
    trainer = make_trainer(*words)
    fit(trainer, run_dir)
    return trainer


def make_parts(*words: str) -> RunParts:
    """Those of a run in one process."""
    return RunParts(composed("train", *words), SingleProcess())


def validated(parts: RunParts) -> dict[str, Any]:
    """The metrics of one validation."""
    loader, validation = parts.validation_loader, parts.validation
    assert loader is not None
    assert validation is not None
    return validation.scores(validation.own(map(loader.microbatches, loader.batches())))


def summary(run_dir: Path) -> dict[str, Any]:
    """What a run leaves in `summary.json`."""
    return json.loads((run_dir / "summary.json").read_text())


@contextmanager
def without_pictures() -> Iterator[None]:
    """Those of the loss take longer than small runs, and have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_directory, "draw_curves", lambda *_: mock.Mock())
        patch.setattr(report, "as_svg", lambda *_: "")
        patch.setattr(report, "draw_curves", lambda *_: None)
        yield


def fit(trainer: Trainer, run_dir: Path) -> None:
    with without_pictures():
        trainer.fit(run_dir)


def check_validations(
    ours: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]
) -> None:
    """Those of two runs have the same metrics, to 1e-10."""
    for one, other in zip(ours, plain, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            if isinstance(value, list):
                torch.testing.assert_close(one[key], value, rtol=0, atol=1e-10, equal_nan=True)
            else:
                assert one[key] == pytest.approx(value, abs=1e-10, nan_ok=True), key
