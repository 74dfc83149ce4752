from __future__ import annotations

import json
import logging

import pytest
from hydra import compose, initialize_config_module

from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.debug.overfit import Overfit
from spatialdl.training.trainer import Trainer
from tests.fitting import fit


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


def run(folder, *overrides: str) -> Trainer:
    given = [
        *("model.width=4", "data.image_size=[24,20]", "data.num_classes=3", "device=cpu"),
        *("data.samples=10", "data.batch_size=4", "debug=overfit", "trainer.max_steps=30"),
    ]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        trainer = Trainer(compose("train", [*given, *overrides]), SingleProcess())
    fit(trainer, folder)
    return trainer


def test_one_batch_is_learned_by_heart_without_validation(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    trainer = run(tmp_path)
    assert trainer.progress.step == 30
    assert "debug=overfit: in 30 steps on one batch the loss fell from" in caplog.text
    assert "the network can learn" in caplog.text
    assert not (tmp_path / "validation.csv").exists()
    loss = json.loads((tmp_path / "summary.json").read_text())["loss"]
    assert len(loss) == 30
    assert loss[-1] < 0.1 * loss[0]


def test_every_step_sees_the_same_batch(tmp_path):
    small = ("optimizer.lr=0", "trainer.max_steps=5", "model.width=2")
    trainer = run(tmp_path, *small, "data/augment=light", "data.workers=1")
    loss = json.loads((tmp_path / "summary.json").read_text())["loss"]
    assert loss == [loss[0]] * 5
    assert trainer.progress.step == 5
    assert not (tmp_path / "checkpoints").exists()


def test_its_steps_are_its_own_unless_the_user_says_some():
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", ["experiment=quickstart", "debug=overfit"])
        assert (config.trainer.max_steps, config.trainer.max_epochs) == (100, None)
        config = compose("train", ["debug=overfit", "trainer.max_steps=7"])
        assert config.trainer.max_steps == 7
