from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from spatialdl.data import ShardWriter
from spatialdl.mesh import Placement
from spatialdl.training.settings import (
    check_batch,
    check_image,
    device_of,
    open_sources,
    placement_of,
)


def config(*overrides: str) -> DictConfig:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return compose("train", list(overrides))


ONE = (1, 1)
SHIPPED = {
    "none": Placement(1, (ONE,)),
    "dp": Placement(2, (ONE,)),
    "sp": Placement(1, ((2, 1),)),
    "lp": Placement(1, (ONE, ONE)),
    "pp": Placement(1, (ONE, ONE)),
    "sp+lp": Placement(1, ((2, 1), ONE)),
    "sp+pp": Placement(1, ((2, 1), ONE)),
}


@pytest.mark.parametrize(("name", "placement"), SHIPPED.items())
def test_the_shipped_layouts_mean_these_ranks(name, placement):
    assert placement_of(config(f"parallel={name}").parallel) == placement


def test_numbers_can_be_changed():
    parallel = config(
        "parallel=sp+pp",
        "parallel.grid=[2,3]",
        "parallel.stages=4",
        "parallel.spatial_stages=2",
        "parallel.data=2",
    ).parallel
    assert placement_of(parallel) == Placement(2, ((2, 3), (2, 3), ONE, ONE))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["parallel.grid=[2]"], r"parallel.grid is \[rows,columns\], got \[2\]"),
        (["parallel.grid=[2,1,1]"], r"parallel.grid is \[rows,columns\]"),
        (["parallel.spatial_stages=2"], "spatial_stages=2 must lie between 0 and.*stages=1"),
        (["parallel.spatial_stages=-1"], "spatial_stages=-1 must lie between"),
        (["parallel.grid=[2,2]"], r"grid=\[2, 2\] cuts images, but parallel=none has no spatial"),
        (["parallel.microbatches=0"], "parallel.microbatches=0 must be at least 1"),
        (["parallel.data=0"], "every degree of parallelism must be at least 1, got data=0"),
        (["parallel.stages=0"], "every degree of parallelism must be at least 1"),
        (["parallel=sp", "parallel.grid=[0,2]"], "every degree of parallelism"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(overrides, sentence):
    with pytest.raises(ValueError, match=sentence):
        placement_of(config(*overrides).parallel)


def test_synthetic_sources():
    sources = open_sources(
        config("data.image_size=[12,9]", "data.samples=6", "data.validation_samples=3").data, 4
    )
    assert (len(sources.train), len(sources.validation)) == (6, 3)
    assert (sources.image_size, sources.channels, sources.num_classes) == ((12, 9), 3, 10)
    assert (sources.train.read(0) != sources.validation.read(0)).any()
    other = open_sources(config("data.image_size=[12,9]", "data.samples=6").data, 5)
    assert (sources.train.read(0) != other.train.read(0)).any()


def test_validation_can_be_left_out():
    assert open_sources(config("data.validation_samples=0").data, 0).validation is None


def test_an_unknown_data_set_is_refused():
    data = config().data
    data.name = "imagenet"
    with pytest.raises(ValueError, match="data=imagenet is unknown: take synthetic or shards"):
        open_sources(data, 0)


def shards(path: Path, samples, classes=("a", "b"), kind="tiles") -> DictConfig:
    with ShardWriter(path, classes, kind=kind) as writer:
        for size, label, split in samples:
            writer.add(np.zeros((*size, 3), np.uint8), label, split)
    return config("data=shards", f"data.path={path}").data


SIZE = (8, 6)


def test_sources_of_shards(tmp_path):
    data = shards(tmp_path / "set", [(SIZE, 0, "train"), (SIZE, 1, "train"), (SIZE, 1, "val")])
    sources = open_sources(data, 0)
    assert (len(sources.train), len(sources.validation)) == (2, 1)
    assert (sources.image_size, sources.channels, sources.num_classes) == (SIZE, 3, 2)


def test_shards_without_the_split_to_validate_on_train_all_the_same(tmp_path):
    data = shards(tmp_path / "set", [(SIZE, 0, "train")])
    assert open_sources(data, 0).validation is None


def test_another_size_than_the_shards_have_is_refused(tmp_path):
    data = shards(tmp_path / "set", [(SIZE, 0, "train")])
    data.image_size = [16, 16]
    with pytest.raises(ValueError, match=r"image_size=\[16, 16\], but the images .* are 8x6"):
        open_sources(data, 0)


def test_samples_without_labels_are_refused(tmp_path):
    data = shards(tmp_path / "set", [(SIZE, 0, "train"), (SIZE, None, "train")])
    with pytest.raises(ValueError, match=r"1 of 2 samples .* have no label.*--labels"):
        open_sources(data, 0)


def test_images_of_several_sizes_are_refused(tmp_path):
    data = shards(tmp_path / "set", [(SIZE, 0, "train"), ((9, 6), 1, "train")], kind="regions")
    with pytest.raises(ValueError, match=r"2 different sizes, such as \[\(8, 6\), \(9, 6\)\]"):
        open_sources(data, 0)


def test_a_batch_must_reach_for_every_microbatch_of_every_replica():
    check_batch(8, 4, 2)
    with pytest.raises(
        ValueError,
        match=r"batch_size=7 cannot be cut into parallel.microbatches=4 x parallel.data=2: "
        "take at least 8",
    ):
        check_batch(7, 4, 2)


@pytest.mark.parametrize("size", [(2, 9), (9, 2)])
def test_an_image_must_reach_for_every_stage(size):
    check_image((3, 3), Placement(1, ((3, 3), ONE)))
    with pytest.raises(ValueError, match=f"{size[0]}x{size[1]} is smaller than the grid 3x3"):
        check_image(size, Placement(1, (ONE, (3, 3))))


def test_devices(monkeypatch):
    assert device_of("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="device=cuda, but PyTorch sees no GPU"):
        device_of("cuda")
