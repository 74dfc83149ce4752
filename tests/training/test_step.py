from __future__ import annotations

import pytest
import torch
from hydra import compose, initialize_config_module

from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import NotFinite
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.parts import RunParts
from spatialdl.training.step import TrainingStep


def parts(*overrides: str) -> RunParts:
    given = [
        *("model=resnet18", "model.width=4", "device=cpu", "trainer.precision=float64"),
        *("data.image_size=[16,12]", "data.samples=8", "data.batch_size=4", "data.num_classes=3"),
        *("trainer.max_steps=4", *overrides),
    ]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return RunParts(compose("train", given), SingleProcess())


def step_of(run: RunParts) -> TrainingStep:
    return TrainingStep(run.config, run.pipeline, run.update, run.task.mixup, 3, SingleProcess())


def first(run: RunParts) -> list[Microbatch]:
    return run.train_loader.microbatches(next(run.train_loader.batches(0, 0)))


@pytest.mark.parametrize("looks", ["debug=detect_nan", "trainer.stop_on_nan=true"])
def test_it_is_forward_backward_and_update_however_it_looks_for_nan(looks: str) -> None:
    by_hand, run = parts("trainer.stop_on_nan=false"), parts(looks)
    expected = by_hand.pipeline.train_step(first(by_hand), 0, by_hand.update.scale)
    by_hand.update.step()
    assert step_of(run).run(first(run), 0) == expected
    for ours, theirs in zip(run.pipeline.parameters(), by_hand.pipeline.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("looks", [False, True])
def test_weights_are_checked_before_a_checkpoint_where_nan_is_looked_for(looks: bool) -> None:
    run = parts(f"trainer.stop_on_nan={looks}")
    step = step_of(run)
    step.check_weights(3)
    with torch.no_grad():
        next(run.pipeline.parameters()).fill_(torch.nan)
    if not looks:
        step.check_weights(3)
        return
    with pytest.raises(NotFinite, match=r"^step 3: \S+ is not finite after the update"):
        step.check_weights(3)
