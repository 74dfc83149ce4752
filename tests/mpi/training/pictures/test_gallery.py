"""Pictures of split images equal those of a single process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from torch import nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.parts import RunParts
from spatialdl.training.pictures import thumbnails
from tests.fitting import train_config, validated

TINY = [
    *("data.image_size=[43,38]", "data.num_classes=3", "device=cpu"),
    *("data.validation_samples=9", "data.batch_size=4", "trainer.max_steps=1"),
    "trainer.precision=float64",
]
UNET = ["model=unet", "model.depth=1", "model.width=4"]
SIGNALS = [
    "++model._target_=tests.mpi.training.pictures.test_gallery.classes_of_places",
    *("~model.width", "task=segmentation"),
]
ENDS_WITH_MEAN = ["++model._target_=tests.mpi.training.small.small", "~model.width"]
LAYOUTS = {
    2: [
        "parallel=gems parallel.microbatches=2",
        "parallel=sp parallel.grid=[1,2]",
        "parallel=dp parallel.shard_state=true",
        "parallel=none parallel.tensor=2",
    ],
    3: ["parallel=sp+pp parallel.microbatches=2", "parallel=sp+lp parallel.cut=[pool]"],
    4: [
        "parallel=sp parallel.grid=[2,2]",
        "parallel=dp+pp parallel.microbatches=2",
        "parallel=sp parallel.tensor=2",
        "parallel=sp+lp parallel.grid=[2,1] parallel.local_dp=2 parallel.cut=[conv3]",
    ],
}


def examples(world, *overrides: str):
    parts = RunParts(train_config(*TINY, *overrides), world)
    validated(parts)
    found = parts.validation.examples()
    parts.close_loaders()
    return found


def check_equal(
    world, monkeypatch, *overrides: str, size: Sequence[int] = (43, 38)
) -> list[list[str]]:
    """The names of the pictures of all examples."""
    monkeypatch.setattr(thumbnails, "SIDE", 9)
    ours = examples(world, *overrides)
    assert (ours is None) == (world.rank > 0)
    if ours is None:
        return []
    task = [word for word in overrides if not word.startswith("parallel")]
    alone = examples(SingleProcess(), *task, "parallel=none")
    assert [(one.sample, one.title) for one in ours] == [(one.sample, one.title) for one in alone]
    for one, other in zip(ours, alone, strict=True):
        assert one.error == pytest.approx(other.error, abs=1e-9)
        assert list(one.pictures) == list(other.pictures)
        for name, picture in one.pictures.items():
            assert max(picture.shape[:2]) <= 9 or len(size) != 2
            np.testing.assert_array_equal(picture, other.pictures[name])
    return [list(one.pictures) for one in ours]


@pytest.mark.parametrize("size", [(9, 13, 11), (45,)])
def test_slices_and_lines_are_those_of_one_process(size, world, monkeypatch):
    """No part has all of a slice, and some have none of one."""
    words = ["model=unet3d", *UNET[1:]] if len(size) == 3 else SIGNALS
    layouts = {1: "none", 2: "sp", 4: "dp+sp"}
    layout = layouts.get(world.size, "sp")
    ranks = world.size // 2 if layout == "dp+sp" else world.size
    grid = [ranks, 1, 1][: len(size)]
    words = [*words, f"data.image_size={list(size)}", f"parallel={layout}"]
    if layout != "none":
        words.append(f"parallel.grid={grid}")
    found = check_equal(world, monkeypatch, *words, size=size)
    assert all(names == ["image", "truth", "predicted"] for names in found)


@pytest.mark.parametrize(("network", "size"), [("of_volumes", (9, 13, 11)), ("of_signals", (45,))])
def test_heat_maps_of_volumes_and_signals(network, size, world, monkeypatch):
    words = [f"++model._target_=tests.training.pictures.test_heat_maps.{network}", "~model.width"]
    words += [f"data.image_size={list(size)}", "parallel=sp" if world.size > 1 else "parallel=none"]
    if world.size > 1:
        words.append(f"parallel.grid={[1, world.size, 1] if len(size) == 3 else [world.size]}")
    found = check_equal(world, monkeypatch, *words, size=size)
    assert all(len(names) == 2 for names in found)


def classes_of_places(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Conv1d(in_channels, num_classes, 3, padding=1)


def test_masks_are_those_of_one_process(world, monkeypatch):
    layouts = {1: ["parallel=none"], 2: ["parallel=sp"], 4: ["parallel=dp+sp"]}
    layout = layouts.get(world.size, ["parallel=sp", f"parallel.grid=[1,{world.size}]"])
    check_equal(world, monkeypatch, *UNET, *layout)


@pytest.mark.parametrize("number", range(3))
def test_heat_maps_are_those_of_one_process(number, world, monkeypatch):
    layouts = LAYOUTS.get(world.size, [f"parallel=sp parallel.grid=[{world.size},1]"])
    if number >= len(layouts):
        pytest.skip("no more layouts for so many ranks")
    task = "task=multilabel" if number == 0 else "task=classification"
    found = check_equal(world, monkeypatch, *ENDS_WITH_MEAN, task, *layouts[number].split())
    assert all(len(names) == 2 for names in found)


def test_a_cut_before_the_linear_layer_leaves_no_heat_maps(world):
    if world.size != 2:
        pytest.skip("of two stages")
    found = examples(world, *ENDS_WITH_MEAN, "parallel=lp", "parallel.cut=[flatten]")
    assert found is None or [list(one.pictures) for one in found] == [["image"]] * 8
