"""``stop_on_nan`` in a single process; several ranks are in tests/mpi/training."""

from __future__ import annotations

import logging
import math
import random
import socket

import pytest
import torch
from hydra import compose, initialize_config_module
from safetensors.torch import load_file

from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import NotFinite
from spatialdl.training.finite import are_finite
from spatialdl.training.optimization.update import Update
from spatialdl.training.trainer import Trainer
from tests.fitting import fit
from tests.training.checkpoints.runs import checkpoints, table

NETWORK = "tests.training.debug.networks.chain"
OFTEN = "trainer.checkpoint.every_steps=1"
LAST = f"stage 0, rank 0 on {socket.gethostname()}"


def trainer(*overrides: str) -> Trainer:
    given = [
        *("model=resnet18", f"model._target_={NETWORK}", "~model.width", "device=cpu"),
        *("data.image_size=[12,10]", "data.samples=8", "data.batch_size=4", "data.num_classes=3"),
        *("data.validation_samples=2", "trainer.max_steps=4", "trainer.checkpoint.best=null"),
    ]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return Trainer(compose("train", [*given, *overrides]), SingleProcess())


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
    run = trainer(*overrides, "+model.call=2", OFTEN)
    with caplog.at_level(logging.INFO), pytest.raises(NotFinite) as found:
        run.fit(tmp_path)
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
        trainer("+model.kind=loss").fit(tmp_path)
    assert str(found.value) == f"step 1: Inf in the loss, forward, micro-batch 0, {LAST}"
    assert "there is no checkpoint" in found.value.__notes__[0]


def test_what_does_not_come_again_is_told_as_such(tmp_path):
    with pytest.raises(NotFinite, match=r"step 2: .* not finite on rank 0, but was finite when"):
        trainer("+model.kind=forward", "+model.call=1").fit(tmp_path)


def test_what_a_network_draws_is_drawn_again(tmp_path):
    random.seed(3)
    with pytest.raises(NotFinite, match=r"step \d+: NaN in poison \(Unlucky\), forward"):
        trainer("+model.kind=unlucky", "trainer.max_steps=100").fit(tmp_path)


def test_the_step_after_a_resumed_one_names_the_checkpoint(tmp_path):
    fit(trainer("trainer.max_steps=2"), tmp_path)
    with pytest.raises(NotFinite) as found:
        trainer("+model.kind=from", "ckpt_path=latest").fit(tmp_path)
    assert str(found.value).startswith("step 3: NaN in poison")
    assert "ckpt_path=latest resumes after step 2" in found.value.__notes__[0]


def test_numbers_are_those_of_a_run_that_does_not_look(tmp_path):
    runs = {choice: trainer(f"trainer.stop_on_nan={choice}") for choice in ("true", "false")}
    for choice, run in runs.items():
        fit(run, tmp_path / choice)
    rows = [table(tmp_path / choice / "metrics.csv") for choice in runs]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    for one, other in zip(*(run.parts.pipeline.parameters() for run in runs.values()), strict=True):
        assert torch.equal(one, other)


def test_whoever_wants_it_trains_on(tmp_path, caplog):
    run = trainer("+model.kind=from", "+model.call=2", "trainer.stop_on_nan=false")
    fit(run, tmp_path)
    losses = [float(row["loss"]) for row in table(tmp_path / "metrics.csv")]
    assert [math.isnan(loss) for loss in losses] == [False, False, True, True]
    assert "step 3: the loss is nan" in caplog.text


def test_overflows_of_scaled_gradients_do_not_stop_a_run(tmp_path):
    run = trainer("trainer.precision=fp16-mixed", "trainer.max_steps=1")
    run.parts.update.scaler.scale = 2.0**100
    fit(run, tmp_path / "scaled")
    assert run.parts.update.skipped
    run = trainer("trainer.precision=fp16-mixed", "+model.kind=from")
    with pytest.raises(NotFinite, match=r"step 1: NaN in poison \(Poison\), forward"):
        run.fit(tmp_path / "wrong")


def test_no_checkpoint_has_a_weight_that_the_update_has_spoilt(tmp_path, monkeypatch):
    run = trainer(OFTEN)
    step = Update.step

    def overflowing(update: Update) -> None:
        step(update)
        if run.progress.step == 2:
            run.parts.pipeline.stages[0].conv2.weight.data[0, 0, 0, 0] = float("inf")

    monkeypatch.setattr(Update, "step", overflowing)
    with pytest.raises(NotFinite, match=r"step 3: conv2\.weight is not finite after the upd"):
        run.fit(tmp_path)
    assert checkpoints(tmp_path) == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_is_found_among_many(value):
    some = [torch.zeros(0), torch.full((3, 5), 3e38), torch.full((4,), -1e308, dtype=torch.float64)]
    assert are_finite(some)
    assert are_finite([])
    some[1][2, 3] = value
    assert not are_finite(some)
