from __future__ import annotations

import logging
import math
from itertools import islice
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module

from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.parts import RunParts


def parts(*overrides: str) -> RunParts:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose(
            "train",
            [
                *("model.width=2", "data.image_size=[40,36]", "data.num_classes=3"),
                *("data.samples=3", "data.batch_size=3", "device=cpu", "trainer.max_steps=1"),
                *overrides,
            ],
        )
    return RunParts(config, SingleProcess())


def validated(ours: RunParts, batches: int | None = None) -> dict[str, Any]:
    loader = ours.validation_loader
    microbatches = map(loader.microbatches, islice(loader.batches(), batches))
    return ours.validation.scores(ours.validation.own(microbatches))


def test_a_class_without_auroc_is_named_once(tmp_path, caplog):
    ours = parts("data.validation_samples=2")
    with caplog.at_level(logging.WARNING):
        validated(ours)
        validated(ours)
    assert [one.message[:15] for one in caplog.records] == ["no AUROC for 2:"]


def test_samples_that_are_met_twice_are_noticed():
    ours = parts("data.validation_samples=4")
    assert validated(ours)["samples"] == 4
    with pytest.raises(RuntimeError, match="got 3 outputs for 4 samples"):
        validated(ours, batches=1)


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression", "segmentation"])
def test_outputs_that_are_no_numbers_have_no_metrics(task):
    unet = ["model=unet", "++model.depth=1"] if task == "segmentation" else []
    ours = parts(*unet, f"task={task}", "data.validation_samples=4")
    with torch.no_grad():
        next(ours.pipeline.parameters()).fill_(torch.nan)
    found = validated(ours)
    assert math.isnan(found.pop("loss"))
    assert found.pop("samples") == 4
    assert all(value in (None, []) for value in found.values())


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_without_a_report_nobody_keeps_pictures(task):
    unet = ["model=unet", "++model.depth=1"] if task == "segmentation" else []
    given = [*unet, f"task={task}", "data.validation_samples=4"]
    with_pictures, without = parts(*given), parts(*given, "trainer.report=false")
    assert validated(with_pictures) == validated(without)
    assert with_pictures.validation.examples()
    assert without.validation.examples() is None
