from __future__ import annotations

from signal import SIGTERM

import pytest
from hydra import compose, initialize_config_module

from spatialdl.training.progress import TrainingProgress


def progress(*overrides: str, steps: int = 8, batches: int = 3) -> TrainingProgress:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return TrainingProgress(compose("train", list(overrides)).trainer, steps, batches)


def due(one: TrainingProgress) -> tuple[list[int], list[int]]:
    """The steps after which a run validates and writes checkpoints."""
    validations, checkpoints = [], []
    while not one.is_over():
        one.step_done()
        if one.validation_is_due():
            one.validated({"loss": 1.0, "accuracy": 0.5, "samples": 1})
            validations.append(one.step)
        if one.checkpoint_is_due():
            checkpoints.append(one.step)
    return validations, checkpoints


@pytest.mark.parametrize(
    ("overrides", "validations", "checkpoints"),
    [
        ([], [3, 6, 8], [3, 6, 8]),
        (["trainer.validate_every=4"], [4, 8], [3, 6, 8]),
        (["trainer.validate_every_epochs=2"], [6, 8], [3, 6, 8]),
        (["trainer.checkpoint.every_epochs=2"], [3, 6, 8], [6, 8]),
        (["trainer.checkpoint.every_epochs=null"], [3, 6, 8], [8]),
        (["trainer.checkpoint.every_steps=4"], [3, 6, 8], [3, 4, 6, 8]),
        (
            ["trainer.early_stopping.metric=loss", "trainer.early_stopping.patience=1"],
            [3, 6],
            [3, 6],
        ),
    ],
)
def test_what_is_due(overrides, validations, checkpoints):
    assert due(progress(*overrides)) == (validations, checkpoints)


def test_a_run_that_is_told_to_stop_saves_and_leaves_the_validation_for_later():
    one = progress()
    for _ in range(3):
        one.step_done()
    one.stopped = SIGTERM
    assert one.is_over()
    assert one.checkpoint_is_due()
    assert not one.validation_is_due()
    again = progress()
    again.restore(one.state())
    assert (again.step, again.epoch, again.batch) == (3, 1, 0)
    assert again.validation_is_due()
    assert not again.is_over()
