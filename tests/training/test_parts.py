"""Components of a run are built and checked before training."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module

from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.parts import RunParts

TINY = [
    *("model.width=2", "data.image_size=[40,36]", "data.num_classes=3", "data.samples=10"),
    *("data.validation_samples=5", "data.batch_size=4", "trainer.max_steps=3", "device=cpu"),
]


def test_parts_belong_to_one_run():
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        parts = RunParts(compose("train", [*TINY, "trainer.accumulate=2"]), SingleProcess())
    assert (parts.batch_size, parts.steps, parts.placement.world_size) == (8, 3, 1)
    assert len(parts.validation_loader) == 1
    batch = parts.train_loader.microbatches(next(parts.train_loader.batches(0, 0)))
    assert len(batch) == parts.microbatches == parts.pipeline.schedule.microbatches
    assert sum(one.samples for one in batch) == parts.batch_size
    parts.close_loaders()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.batch_size=3", "parallel.microbatches=4"], "batch_size=3 cannot be split"),
        (["trainer.max_steps=0"], "max_steps=0 and trainer.max_epochs=None leave no step"),
        (["trainer.max_steps=null"], "leave no step to train"),
        (["++model._target_=builtins.dict"], "model=builtins.dict creates a dict, expected"),
        (
            ["++model._target_=spatialdl.models.nothing"],
            "nothing cannot be imported: .* no attribute",
        ),
        (
            ["data.validation_samples=0", "trainer.early_stopping.metric=loss"],
            "early_stopping.metric=loss needs validation samples, but there are none",
        ),
        (["++model.depth=7"], "model=spatialdl.models.resnet18 cannot be built.*depth"),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides, sentence):
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", [*TINY, *overrides])
    with pytest.raises(ValueError, match=f"(?s){sentence}"):
        RunParts(config, SingleProcess())
