from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig

from spatialdl.data import ShardWriter
from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.training.settings import open_sources
from tests.composing import composed

config = partial(composed, "train")
SIZE = (8, 6)


def test_synthetic_sources():
    sources = open_sources(
        config("data.image_size=[12,9]", "data.samples=6", "data.validation_samples=3").data, 4
    )
    assert (len(sources.train), len(sources.validation)) == (6, 3)
    assert (sources.image_size, sources.channels, sources.num_classes) == ((12, 9), 3, 10)
    assert (sources.train.read(0) != sources.validation.read(0)).any()
    small = ("data.image_size=[12,9]", "data.samples=6", "data.validation_samples=0")
    other = open_sources(config(*small).data, 5)
    assert (sources.train.read(0) != other.train.read(0)).any()
    assert other.validation is None


def shards(path: Path, samples, classes=("a", "b"), kind="tiles") -> DictConfig:
    with ShardWriter(path, classes, kind=kind) as writer:
        for size, label, split in samples:
            writer.add(np.zeros((*size, 3), np.uint8), label, split)
    return config("data=shards", f"data.path={path}").data


def test_sources_of_shards(tmp_path, caplog):
    data = shards(tmp_path / "set", [(SIZE, 0, "train"), (SIZE, 1, "train"), (SIZE, 1, "val")])
    sources = open_sources(data, 0)
    assert (len(sources.train), len(sources.validation)) == (2, 1)
    assert (sources.image_size, sources.channels, sources.num_classes) == (SIZE, 3, 2)
    data = shards(tmp_path / "other", [(SIZE, 0, "train")])
    with caplog.at_level("INFO"):
        assert open_sources(data, 0).validation is None
    assert "has no split val: the run has no validation" in caplog.text


def test_the_normalisation_fits_the_images(tmp_path):
    data = shards(tmp_path / "set", [(SIZE, 0, "train"), (SIZE, 1, "train")])
    data.mean, data.std, data.scale = [0.1, 0.2, 0.3], 0.5, 200
    sources = open_sources(data, 0)
    assert sources.described()["input"] == {
        **{"mean": [0.1, 0.2, 0.3], "std": [0.5] * 3},
        **{"scale": 200, "dtype": "uint8"},
    }
    assert sources.train_views.white == 200


def test_another_size_than_the_shards_have_is_cropped_or_padded(tmp_path):
    data = shards(tmp_path / "set", [(SIZE, 0, "train"), (SIZE, 1, "val")])
    data.image_size = [16, 5]
    data.background = 7
    sources = open_sources(data, 0)
    assert sources.image_size == (16, 5)
    for views in (sources.train_views, sources.validation_views):
        image = views.read(0, 0, (0, 16, 0, 5))
        assert (image[4:12] == 0).all()
        assert (image[:4] == 7).all()
        assert (image[12:] == 7).all()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.num_classes=1", r"num_classes=1, but .* has 2 classes \(a, b\)"),
        ("data.mean=[0.1,0.2]", r"data\.mean has 2 numbers, .* the images have 3 channels"),
        ("data.scale=4095", r"data\.scale=4095 is not a value of uint8 images"),
        ("data.name=imagenet", "data=imagenet is unknown: use shards, bags, dataset or synth"),
        (
            "data.image_size=[4,8,6]",
            r"=\[4, 8, 6\] has 3 numbers, but .* have 2 dims, such as 8 x 6",
        ),
        ("data.image_size=16", r"data.image_size must be \[rows,columns\], .*, got 16"),
        ("data.image_size=[16,0]", r"data.image_size must be \[rows,columns\], .*, got \[16, 0\]"),
        ("data.background=256", "data.background=256 is not a value of uint8 images: use 0 to 255"),
        ("data.background=white", "data.background=white must be a number, or null for white"),
        ("data.workers=-1", "data.workers=-1 must be a whole number of at least 0"),
        ("data.workers=true", "data.workers=True must be a whole number of at least 0"),
        ("data.augment.blur=99", "data.augment.blur=99 is out of range"),
        ("+data.augment.flips=1", "data.augment.flips is unknown"),
    ],
)
def test_what_the_data_cannot_be_is_refused(tmp_path, override, sentence):
    shards(tmp_path / "set", [(SIZE, 0, "train")])
    data = config("data=shards", f"data.path={tmp_path / 'set'}", override).data
    with pytest.raises(ValueError, match=sentence):
        open_sources(data, 0)


def test_training_is_augmented_and_validation_is_not():
    preset = ["data/augment=pathology", "data.image_size=[12,9]", "data.channels=3"]
    sources = open_sources(config(*preset, "data.augment.blur=2").data, 5)
    assert sources.train_views.augmentation == Augmentation(
        "random", 0.5, True, 0.1, 0.1, 0.1, 0.02, 0.05, 2
    )
    assert (sources.train_views.seed, sources.validation_views.augmentation) == (5, None)
    box = (0, 12, 0, 9)
    assert (sources.train_views.read(0, 0, box) != sources.train.read(0)).any()
    assert (sources.validation_views.read(3, 0, box) == sources.validation.read(0)).all()


def test_samples_without_labels_are_refused(tmp_path):
    data = shards(tmp_path / "set", [(SIZE, 0, "train"), (SIZE, None, "train")])
    with pytest.raises(ValueError, match=r"1 of 2 samples .* have no label.*--labels"):
        open_sources(data, 0)
    data = masked(tmp_path / "masked", classes=())
    with pytest.raises(ValueError, match=r"have no label.*, or use task=segmentation, which"):
        open_sources(data, 0)


def test_images_of_several_sizes_need_one_for_the_batch(tmp_path):
    samples = [(SIZE, 0, "train"), ((9, 6), 1, "train"), ((4, 9), 1, "val")]
    data = shards(tmp_path / "set", samples, kind="regions")
    with pytest.raises(ValueError, match=r"3 different sizes, such as .*=.rows,columns."):
        open_sources(data, 0)
    data.image_size = [8, 8]
    views = open_sources(data, 0).train_views
    assert [views.read(0, n, (0, 8, 0, 8)).shape for n in (0, 1)] == [(8, 8, 3)] * 2


def masked(path: Path, classes=("a", "b"), masks=True) -> DictConfig:
    with ShardWriter(path, classes) as writer:
        for _ in range(2):
            mask = np.ones(SIZE, np.uint8) if masks else None
            writer.add(np.zeros((*SIZE, 3), np.uint8), None, "train", mask=mask)
    return config("data=shards", f"data.path={path}").data


def test_segmentation_wants_masks_and_no_labels(tmp_path):
    sources = open_sources(masked(tmp_path / "set"), 0, "segmentation")
    assert (len(sources.train), sources.num_classes) == (2, 2)
    assert sources.train.read_mask(0).shape == SIZE
    with pytest.raises(ValueError, match=r"has no masks.*mask=.*task=classification"):
        open_sources(masked(tmp_path / "bare", masks=False), 0, "segmentation")


def test_masks_without_names_of_classes_need_their_number(tmp_path):
    data = masked(tmp_path / "set", classes=())
    with pytest.raises(ValueError, match=r"has no class names: set data.num_classes"):
        open_sources(data, 0, "segmentation")
    data.num_classes = 4
    assert open_sources(data, 0, "segmentation").num_classes == 4


@pytest.mark.parametrize("task", ["segmentation", "multilabel", "regression"])
def test_synthetic_targets_and_masks(task):
    sources = open_sources(config("data.image_size=[12,9]", "data.num_classes=3").data, 4, task)
    if task == "segmentation":
        for source in (sources.train, sources.validation):
            assert source.has_masks
            assert source.read_mask(1).max() < 3
        return
    assert sources.names == ("0", "1", "2")
    assert sources.train.labels.shape == (64, 3)
    assert (sources.train.labels[:16] != sources.validation.labels).any()


def test_targets_take_the_place_of_labels(tmp_path):
    data = shards(tmp_path / "set", [(SIZE, None, "train"), (SIZE, None, "val")])
    with pytest.raises(ValueError, match=r"task=multilabel needs data.targets=FILE.csv"):
        open_sources(data, 0, "multilabel")
    data.targets = str(tmp_path / "targets.csv")
    (tmp_path / "targets.csv").write_text("sample,age,mass\n0,63,70.5\n1,71,\n")
    sources = open_sources(data, 0, "regression")
    assert (sources.names, sources.num_classes) == (("age", "mass"), 2)
    assert sources.train.labels.tolist() == [[63, 70.5]]
    assert sources.validation.labels[0, 0] == 71
    with pytest.raises(ValueError, match=r"is for task=multilabel or regression, got task=cl"):
        open_sources(data, 0)
    data.num_classes = 3
    with pytest.raises(ValueError, match=r"num_classes=3, but .* has 2 targets \(age, mass\)"):
        open_sources(data, 0, "regression")


def test_volumes_are_described_by_orientation_and_spacing(tmp_path):
    affine = np.array([[0, 0, 1, 0], [0, 1, 0, 0], [2, 0, 0, 0.0]])
    with ShardWriter(tmp_path / "set", classes=["a", "b"], kind="volumes") as writer:
        for number in range(3):
            split = "val" if number == 2 else "train"
            spacing = (2.0 + number, 1, 1)
            writer.add(np.zeros((4, 5, 6)), 0, split, spacing=spacing, affine=affine)
    data = config("data=shards", f"data.path={tmp_path / 'set'}", "data.channels=1").data
    found = open_sources(data, 0).described()["geometry"]
    assert found == {"orientation": "SAR", "spacing": [[2, 1, 1], [3, 1, 1]]}
    assert "geometry" not in open_sources(config().data, 0).described()
