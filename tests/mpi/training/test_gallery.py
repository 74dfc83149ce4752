"""Pictures of images that no rank holds are those of one process."""

from __future__ import annotations

import numpy as np
import pytest
from hydra import compose, initialize_config_module

from spatialdl.comm.alone import Alone
from spatialdl.training import thumbnails
from spatialdl.training.trainer import Trainer

SMALL = [
    *("model.width=4", "data.image_size=[43,38]", "data.num_classes=3", "device=cpu"),
    *("data.validation_samples=9", "data.batch_size=4", "trainer.max_steps=1"),
    "trainer.precision=float64",
]
UNET = ["model=unet", "model.depth=1"]


def examples(world, *overrides: str):
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", [*SMALL, *overrides])
    trainer = Trainer(config, world)
    feed = trainer.validation_feed
    trainer.validation.scores(trainer.validation.own(map(feed.microbatches, feed.batches())))
    found = trainer.validation.examples()
    trainer._close_feeds()
    return found


@pytest.mark.parametrize("task", [[], UNET], ids=["labels", "masks"])
def test_examples_are_those_of_one_process(task, world, monkeypatch):
    monkeypatch.setattr(thumbnails, "SIDE", 17)
    layouts = {
        1: ["parallel=none"],
        2: ["parallel=sp"],
        3: ["parallel=sp+pp", "parallel.microbatches=2"],
        4: ["parallel=dp+sp"],
    }
    layout = layouts.get(world.size, ["parallel=sp", f"parallel.grid=[{world.size},1]"])
    if task and world.size == 3:  # a U-Net is no chain
        layout = ["parallel=sp", "parallel.grid=[1,3]"]
    ours = examples(world, *task, *layout)
    assert (ours is None) == (world.rank > 0)
    if ours is None:
        return
    alone = examples(Alone(), *task, "parallel=none")
    assert [(one.sample, one.title) for one in ours] == [(one.sample, one.title) for one in alone]
    for one, other in zip(ours, alone, strict=True):
        assert one.error == pytest.approx(other.error, abs=1e-9)
        assert list(one.pictures) == list(other.pictures)
        for name, picture in one.pictures.items():
            assert max(picture.shape[:2]) <= 17
            np.testing.assert_array_equal(picture, other.pictures[name])
