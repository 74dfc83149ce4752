"""Values that are not finite in a single process; several ranks are in tests/mpi/training."""

from __future__ import annotations

import logging
import math
import random
import socket

import pytest
import torch
from safetensors.torch import load_file

from spatialdl.errors import NotFinite
from spatialdl.training.finite import ComputationOrder, Finding, are_finite
from spatialdl.training.optimization.update import Update
from spatialdl.training.trainer import Trainer
from tests.fitting import fit, make_trainer
from tests.training.checkpoints.runs import checkpoints, table
from tests.training.not_finite import CHAIN

OFTEN = "trainer.checkpoint.every_steps=1"
LAST = f"stage 0, rank 0 on {socket.gethostname()}"


def trainer(*words: str) -> Trainer:
    small = ("data.image_size=[12,10]", "data.samples=8", "data.batch_size=4", "device=cpu")
    more = ("data.validation_samples=2", "trainer.max_steps=4", "trainer.checkpoint.best=null")
    return make_trainer(*CHAIN, *small, "data.num_classes=3", *more, *words)


# --- before the update


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["+model.kind=from"], "NaN in poison (Poison), forward, micro-batch 0"),
        (["+model.kind=backward"], "Inf in poison (BadGradient), backward, micro-batch 0"),
        (
            ["+model.kind=backward", "parallel.recompute=stage"],  # which counts a call once
            "Inf in poison (BadGradient), backward, micro-batch 0",
        ),
    ],
)
def test_a_run_stops_before_its_weights_are_spoilt(overrides, where, tmp_path, caplog):
    run = trainer("++model.call=2", *overrides, OFTEN)
    with caplog.at_level(logging.INFO), pytest.raises(NotFinite) as found:
        fit(run, tmp_path)
    assert str(found.value) == f"step 3: {where}, {LAST}"
    assert "ckpt_path=latest resumes after step 2" in found.value.__notes__[0]
    assert checkpoints(tmp_path) == [1, 2]
    latest = (tmp_path / "checkpoints" / "latest").read_text().strip()
    kept = load_file(tmp_path / "checkpoints" / latest / "stage-00.safetensors")
    for name, weight in run.parts.pipeline.named_parameters():
        assert torch.equal(kept[name], weight), "no step was made since"
        assert weight.isfinite().all()
    assert [row["step"] for row in table(tmp_path / "metrics.csv")] == ["1", "2"]
    assert f"Stopped: step 3: {where}" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "summary.json").exists()


def test_a_loss_that_is_infinite_stops_the_first_step(tmp_path):
    with pytest.raises(NotFinite) as found:
        fit(trainer("+model.kind=loss"), tmp_path)
    assert str(found.value) == f"step 1: Inf in the loss, forward, micro-batch 0, {LAST}"
    assert "there is no checkpoint" in found.value.__notes__[0]


def test_what_does_not_come_again_is_told_as_such(tmp_path):
    with pytest.raises(NotFinite, match=r"step 2: .* not finite on rank 0, but was finite when"):
        fit(trainer("+model.kind=forward", "+model.call=1"), tmp_path)


def test_what_a_network_draws_is_drawn_again(tmp_path):
    random.seed(3)
    with pytest.raises(NotFinite, match=r"step \d+: NaN in poison \(Unlucky\), forward"):
        fit(trainer("+model.kind=unlucky", "trainer.max_steps=100"), tmp_path)


def test_the_step_after_a_resumed_one_names_the_checkpoint(tmp_path):
    fit(trainer("trainer.max_steps=2"), tmp_path)
    with pytest.raises(NotFinite) as found:
        fit(trainer("+model.kind=from", "ckpt_path=latest"), tmp_path)
    assert str(found.value).startswith("step 3: NaN in poison")
    assert "ckpt_path=latest resumes after step 2" in found.value.__notes__[0]


def test_overflows_of_scaled_gradients_do_not_stop_a_run(tmp_path):
    """The update leaves such a step out; activations and losses are looked at all the same."""
    half = ("trainer.precision=fp16-mixed", "trainer.max_steps=1")
    run = trainer(*half)
    run.parts.update.scaler.scale = 2.0**100
    fit(run, tmp_path / "scaled")
    assert run.parts.update.skipped
    with pytest.raises(NotFinite, match=r"step 1: NaN in poison \(Poison\), forward"):
        fit(trainer(*half, "+model.kind=from"), tmp_path / "wrong")


def test_no_checkpoint_has_a_weight_that_the_update_has_spoilt(tmp_path, monkeypatch):
    run = trainer(OFTEN)
    step = Update.step

    def overflowing(update: Update) -> None:
        step(update)
        if run.progress.step == 2:
            run.parts.pipeline.stages[0].conv2.weight.data[0, 0, 0, 0] = float("inf")

    monkeypatch.setattr(Update, "step", overflowing)
    with pytest.raises(NotFinite, match=r"step 3: conv2\.weight is not finite after the upd"):
        fit(run, tmp_path)
    assert checkpoints(tmp_path) == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_is_found_among_many(value):
    some = [torch.zeros(0), torch.full((3, 5), 3e38), torch.full((4,), -1e308, dtype=torch.float64)]
    assert are_finite(some)
    assert are_finite([])
    some[1][2, 3] = value
    assert not are_finite(some)


# --- where it comes from


def test_a_weight_that_is_not_finite_is_found_where_it_is_used(tmp_path):
    run = trainer()
    run.parts.pipeline.stages[0].conv2.weight.data[0, 0, 0, 0] = float("-inf")
    with pytest.raises(NotFinite, match=r"step 1: .* in conv2 \(Conv2d\), forward, micro-batch 0"):
        fit(run, tmp_path)


def test_what_overflows_between_modules_is_the_input_of_the_next(tmp_path):
    run = trainer("parallel.microbatches=2")
    pipeline = run.parts.pipeline
    pipeline.stages[0].conv2.register_forward_pre_hook(
        lambda _, args: (args[0] / (1 - pipeline.doing.microbatch),), prepend=True
    )
    where = r"in the input of conv2 \(Conv2d\), forward, micro-batch 1"
    with pytest.raises(NotFinite, match=where):
        fit(run, tmp_path)


def test_what_comes_first_does_not_depend_on_the_rank():
    def finding(microbatch, phase, stage, number, rank):
        return Finding(ComputationOrder(microbatch, phase, stage, number), rank, "here", "NaN", "x")

    forward, later = finding(0, 0, 1, 3, 5), finding(0, 0, 2, 0, 0)
    backward_late, backward_early = finding(0, 2, -1, 0, 1), finding(0, 2, -2, 9, 2)
    next_one = finding(1, 0, 0, 0, 0)
    order = [forward, later, backward_early, backward_late, next_one]
    assert sorted([*order[2:], *order[:2]]) == order
