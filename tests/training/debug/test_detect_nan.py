"""NaN detection in a single process; several ranks are in tests/mpi/training/debug."""

from __future__ import annotations

import socket

import pytest
import torch
from hydra import compose, initialize_config_module

from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import NotFinite
from spatialdl.training.debug.detect_nan import ComputationOrder, Finding
from spatialdl.training.trainer import Trainer
from tests.fitting import fit

NETWORK = "tests.training.debug.networks.chain"


def trainer(*overrides: str) -> Trainer:
    given = [
        *("model=resnet18", f"model._target_={NETWORK}", "~model.width", "debug=detect_nan"),
        *("data.image_size=[12,10]", "data.samples=8", "data.batch_size=4", "device=cpu"),
        *("data.num_classes=3", "trainer.max_steps=3", "data.validation_samples=2"),
    ]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return Trainer(compose("train", [*given, *overrides]), SingleProcess())


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["+model.kind=forward"], "step 1: NaN in poison (Poison), forward, micro-batch 0"),
        (
            ["+model.kind=forward", "+model.call=2"],
            "step 3: NaN in poison (Poison), forward, micro-batch 0",
        ),
        (
            ["+model.kind=forward", "+model.call=3", "parallel.microbatches=2"],
            "step 2: NaN in poison (Poison), forward, micro-batch 1",
        ),
        (["+model.kind=backward"], "step 1: Inf in poison (BadGradient), backward, micro-batch 0"),
        (["+model.kind=loss"], "step 1: Inf in the loss, forward, micro-batch 0"),
        (
            ["+model.kind=forward", "parallel.recompute=block"],
            "step 1: NaN in poison (Poison), forward, micro-batch 0",
        ),
        (
            ["+model.kind=backward", "parallel.recompute=stage"],
            "step 1: Inf in poison (BadGradient), backward, micro-batch 0",
        ),
    ],
)
def test_the_first_of_them_is_named(overrides, where, tmp_path):
    run = trainer(*overrides)
    with pytest.raises(NotFinite) as found:
        run.fit(tmp_path)
    assert str(found.value) == f"{where}, stage 0, rank 0 on {socket.gethostname()}"


def test_a_weight_that_is_not_finite_is_found_where_it_is_used(tmp_path):
    run = trainer()
    run.parts.pipeline.stages[0].conv2.weight.data[0, 0, 0, 0] = float("-inf")
    with pytest.raises(NotFinite, match=r"step 1: .* in conv2 \(Conv2d\), forward, micro-batch 0"):
        run.fit(tmp_path)


def test_numbers_are_those_of_a_run_that_does_not_look(tmp_path):
    watched, plain = trainer(), trainer("debug=none")
    for run in (watched, plain):
        fit(run, tmp_path / run.config.debug.name)
    for one, other in zip(
        watched.parts.pipeline.parameters(), plain.parts.pipeline.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_what_overflows_between_modules_is_the_input_of_the_next(tmp_path):
    run = trainer()
    stage = run.parts.pipeline.stages[0]
    stage.conv2.register_forward_pre_hook(lambda _, args: (args[0] / 0,), prepend=True)
    with pytest.raises(NotFinite, match=r"in the input of conv2 \(Conv2d\), forward"):
        run.fit(tmp_path)


def test_what_comes_first_does_not_depend_on_the_rank():
    def finding(microbatch, phase, stage, number, rank):
        return Finding(ComputationOrder(microbatch, phase, stage, number), rank, "here", "NaN", "x")

    forward, later = finding(0, 0, 1, 3, 5), finding(0, 0, 2, 0, 0)
    backward_late, backward_early = finding(0, 2, -1, 0, 1), finding(0, 2, -2, 9, 2)
    next_one = finding(1, 0, 0, 0, 0)
    order = [forward, later, backward_early, backward_late, next_one]
    assert sorted([*order[2:], *order[:2]]) == order


def test_gradients_of_scaled_losses_may_overflow(tmp_path):
    """The update leaves such a step out; activations and losses are looked at all the same."""
    run = trainer("trainer.precision=fp16-mixed", "trainer.max_steps=1")
    run.parts.update.scaler.scale = 2.0**100
    fit(run, tmp_path / "scaled")
    assert run.parts.update.skipped
    run = trainer("trainer.precision=fp16-mixed")
    stage = run.parts.pipeline.stages[0]
    stage.conv2.register_forward_pre_hook(lambda _, args: (args[0] / 0,), prepend=True)
    with pytest.raises(NotFinite, match=r"in the input of conv2 \(Conv2d\), forward"):
        run.fit(tmp_path / "wrong")
