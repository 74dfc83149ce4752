"""User callbacks: order of calls, saved state, and stopping a run."""

from __future__ import annotations

import json

import pytest
from omegaconf import DictConfig

from spatialdl.training.callbacks import Callbacks, callback_plugins
from spatialdl.training.checks import check_config
from spatialdl.training.trainer import Trainer
from tests import fitting
from tests.composing import composed
from tests.fitting import summary
from tests.training.own_callbacks import STATES

OWN = "tests.training.own_callbacks"
SMALL = (
    *("++model._target_=tests.training.checkpoints.runs.network", "~model.width", "device=cpu"),
    *("data.image_size=[20,18]", "data.num_classes=3", "data.samples=8"),
    *("data.validation_samples=2", "data.batch_size=2", "trainer.report=false"),
)


def config(*overrides: str) -> DictConfig:
    return composed("train", *SMALL, *overrides)


def trained(run_dir, *overrides: str) -> Trainer:
    return fitting.train(run_dir, *SMALL, *overrides)


def recorded(run_dir) -> dict:
    return json.loads((run_dir / "calls-0.json").read_text())


def test_the_order_of_calls_and_what_they_get(tmp_path):
    words = f"trainer.callbacks=[{{_target_: {OWN}.Recorder}}]"
    trained(tmp_path, words, "trainer.max_steps=5", "trainer.validate_every=2")
    calls = recorded(tmp_path)["calls"]
    assert [(name, step) for name, step, *_ in calls] == [
        *(("fit_start", 0), ("step_end", 1)),
        *(("step_end", 2), ("validation_end", 2), ("checkpoint", 2)),  # the best so far
        ("step_end", 3),
        *(("step_end", 4), ("validation_end", 4), ("checkpoint", 4)),
        *(("step_end", 5), ("validation_end", 5), ("checkpoint", 5), ("fit_end", 5)),
    ]
    assert [loss for name, _, loss, _ in calls if name == "step_end"] == summary(tmp_path)["loss"]
    found = [loss for name, _, _, loss in calls if name == "validation_end"]
    assert found == [one["loss"] for one in summary(tmp_path)["validation"]]


def test_one_that_stops_ends_the_run_after_its_step(tmp_path, caplog):
    words = f"trainer.callbacks=[{{_target_: {OWN}.Recorder, stop_at: 3}}]"
    with caplog.at_level("INFO"):
        trainer = trained(tmp_path, words, "trainer.max_steps=8")
    assert trainer.progress.step == 3
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()
    assert "Stopped by a callback after step 3 of 8: as was asked for." in caplog.text


def test_state_goes_with_checkpoints(tmp_path, caplog):
    words = f"trainer.callbacks=[{{_target_: {OWN}.Recorder}}]"
    trained(tmp_path / "whole", words, "trainer.max_steps=6")
    trained(tmp_path / "parts", words, "trainer.max_steps=3")
    trained(tmp_path / "parts", words, "trainer.max_steps=6", "ckpt_path=latest")
    again, whole = recorded(tmp_path / "parts"), recorded(tmp_path / "whole")
    assert again["average"] == whole["average"]
    assert again["calls"][0][:2] == ["fit_start", 3]
    with caplog.at_level("INFO"):
        other = words.replace("Recorder}", "Recorder, name: other}")
        trained(tmp_path / "parts", other, "trainer.max_steps=7", "ckpt_path=latest")
    assert "checkpoint has no state of other" in caplog.text
    assert "state of Recorder in the checkpoint is ignored" in caplog.text


def test_an_exception_names_the_callback(tmp_path):
    words = f"trainer.callbacks=[{{_target_: {OWN}.Failing}}]"
    with pytest.raises(OSError, match="no room") as raised:
        trained(tmp_path, words, "trainer.max_steps=3")
    assert "(in on_step_end of the callback Failing, after step 1)" in raised.value.__notes__


@pytest.mark.parametrize("kind", STATES)
def test_a_state_that_no_checkpoint_can_keep_is_refused_before_the_first_step(kind, tmp_path):
    words = f"trainer.callbacks=[{{_target_: {OWN}.KeepsOdd, kind: {kind}}}]"
    with pytest.raises(ValueError, match="state_dict of KeepsOdd"):
        trained(tmp_path, words, "trainer.max_steps=3")
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trainer.callbacks=yes", "trainer.callbacks=.* must be a list"),
        ("trainer.callbacks=[{a: 1}]", "has no class: write it as {_target_: package.Class}"),
        ("trainer.callbacks=[{_target_: a.B},{_target_: c.B}]", "duplicate name B"),
    ],
)
def test_lists_that_name_no_callbacks_are_refused_before_ranks_start(words, said):
    with pytest.raises(ValueError, match=said):
        check_config(config(words))


def test_what_is_no_callback_is_refused():
    given = config("trainer.callbacks=[{_target_: torch.nn.ReLU}]")
    with pytest.raises(ValueError, match=r"creates a ReLU, expected .* of spatialdl\.Callback"):
        Callbacks(callback_plugins(given.trainer))
