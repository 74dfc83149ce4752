from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from spatialdl.training.loggers.tensorboard import TensorBoard


@pytest.fixture(autouse=True)
def numbered_from_nought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one second and process are read in the order of their names, and 10 before 9."""
    counter = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)


def events(run_dir: Path) -> EventAccumulator:
    found = EventAccumulator(str(run_dir / "tensorboard"))
    found.Reload()
    return found


def test_steps_of_a_run_that_was_killed_before_its_first_checkpoint_go(tmp_path):
    """They were shown twice."""
    log(tmp_path, range(1, 4))
    log(tmp_path, range(1, 6))
    assert [e.step for e in events(tmp_path).Scalars("train/loss")] == list(range(1, 6))


def log(run_dir: Path, steps: range, done: int = 0) -> None:
    logger = TensorBoard(run_dir, done)
    logger.log_config({"optimizer": {"lr": 0.1}})
    for step in steps:
        logger.log_step(step, {"loss": 1 / step, "halo": 0.25})
    logger.log_validation(steps[-1], {"accuracy": 0.5, "loss": math.nan})
    logger.log_image(steps[-1], "sample 0", np.full((4, 5, 3), 200, np.uint8))
    logger.finish()


def test_what_was_logged_can_be_read(tmp_path):
    log(tmp_path, range(1, 4))
    found = events(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [
        *((1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)))
    ]
    assert [e.value for e in found.Scalars("validation/accuracy")] == [0.5]
    assert math.isnan(found.Scalars("validation/loss")[0].value)
    (picture,) = found.Images("sample 0")
    assert (picture.height, picture.width, picture.step) == (4, 5, 3)
    (text,) = found.Tensors("config/text_summary")
    assert b"lr: 0.1" in text.tensor_proto.string_val[0]


def test_a_run_that_goes_on_replaces_what_came_after_its_checkpoint(tmp_path):
    log(tmp_path, range(1, 6))
    log(tmp_path, range(4, 8), done=3)
    assert [e.step for e in events(tmp_path).Scalars("train/loss")] == list(range(1, 8))
