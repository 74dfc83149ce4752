from __future__ import annotations

import logging

import pytest

from spatialdl.training.debug.overfit import Overfit
from spatialdl.training.trainer import Trainer
from tests.fitting import fit, make_trainer, summary, train_config


def after(*losses: float) -> Overfit:
    found = Overfit()
    for loss in losses:
        found.note(loss)
    return found


@pytest.mark.parametrize(
    ("losses", "can_learn", "sentence"),
    [
        ((2.0, 1.0, 0.1), True, "fell from 2 to 0.1: the network can learn"),
        ((2.0, 1.5, 1.0), False, "fell from 2 to 1, which is not near zero: try more"),
        ((2.0, 2.5), False, "the loss did not fall: it was 2 and is 2.5; change optimizer.lr"),
        ((2.0, 0.1, 1.0), False, "from 2 to 1, but was 0.1 before: the network can learn, but"),
        ((2.0, float("nan")), False, "the loss is nan: find the origin with debug=detect_nan"),
    ],
)
def test_the_verdict(losses, can_learn, sentence):
    found = after(*losses)
    assert found.can_learn is can_learn
    assert sentence in found.verdict(len(losses))


def run(folder, *words: str) -> Trainer:
    given = ("model.width=4", "data.image_size=[24,20]", "data.num_classes=3", "device=cpu")
    more = ("data.samples=10", "data.batch_size=4", "debug=overfit", "trainer.max_steps=30")
    trainer = make_trainer(*given, *more, *words)
    fit(trainer, folder)
    return trainer


def test_one_batch_is_learned_by_heart_without_validation(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    trainer = run(tmp_path)
    assert trainer.progress.step == 30
    assert "debug=overfit: in 30 steps on one batch the loss fell from" in caplog.text
    assert "the network can learn" in caplog.text
    assert not (tmp_path / "validation.csv").exists()
    loss = summary(tmp_path)["loss"]
    assert len(loss) == 30
    assert loss[-1] < 0.1 * loss[0]


def test_every_step_sees_the_same_batch(tmp_path):
    small = ("optimizer.lr=0", "trainer.max_steps=3", "model.width=2")
    trainer = run(tmp_path, *small, "data/augment=light", "data.workers=1")
    loss = summary(tmp_path)["loss"]
    assert loss == [loss[0]] * 3
    assert trainer.progress.step == 3
    assert not (tmp_path / "checkpoints").exists()


def test_its_steps_are_its_own_unless_the_user_says_some():
    found = train_config("experiment=quickstart", "debug=overfit").trainer
    assert (found.max_steps, found.max_epochs) == (100, None)
    assert train_config("debug=overfit", "trainer.max_steps=7").trainer.max_steps == 7
