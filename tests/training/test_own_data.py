from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from omegaconf import DictConfig

from spatialdl.comm.single_process import SingleProcess
from spatialdl.common.configuring.overrides import check_overrides
from spatialdl.common.configuring.own_keys import rewritten
from spatialdl.data import ShardWriter
from spatialdl.data.shards import ShardDataset
from spatialdl.training.own_data import check_same_samples
from spatialdl.training.settings import open_sources
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.data import own_datasets
from tests.fitting import fit, summary

HERE = own_datasets.__name__


def config(kind: str, *more: str) -> DictConfig:
    words = ["data=dataset", f"data.dataset._target_={kind}", *more]
    return composed("train", *map(rewritten, words))


def opened(kind: str, *more: str, task: str = "classification", seed: int = 3):
    return open_sources(config(f"{HERE}.{kind}", *more).data, seed, task)


def test_a_data_set_says_what_its_images_are_like():
    sources = opened("Noise", "data.validation.split=val", "data.validation.count=4")
    assert (len(sources.train), len(sources.validation)) == (7, 4)
    assert (sources.image_size, sources.channels, sources.num_classes) == ((21, 18), 3, 2)
    assert sources.names == tuple(own_datasets.CLASSES)
    assert sources.train.dataset.split == "train"
    assert sources.validation.dataset.split == "val"
    assert sources.described()["input"] == {
        **{"mean": [0.0] * 3, "std": [1.0] * 3, "scale": 1, "dtype": "float64"}
    }
    assert opened("Noise").validation is None


def test_pictures_are_read_as_arrays_of_one_shape():
    sources = opened("Pictures", "data.num_classes=2", "data.validation.train=false")
    assert (sources.image_size, sources.train.dtype) == ((9, 11), np.uint8)
    assert not sources.validation.dataset.train
    read = sources.train_views.read(0, 2, (1, 4, 2, 5))
    assert np.array_equal(read, np.asarray(sources.train.dataset[2][0])[1:4, 2:5])
    mixed = opened("Pictures", "data.num_classes=2", "data.dataset.modes=[RGB,L]")
    with pytest.raises(ValueError, match=r"sample 1 of data.dataset .*has 1 channels, the first"):
        mixed.train.read(1)


@pytest.mark.parametrize(
    ("kind", "words", "sentence"),
    [
        ("Stream", (), "data.dataset .*Stream.* is an iterable data set"),
        ("Given", (), r"has no samples \(its length is 0\)"),
        ("Missing", (), "data.dataset: .*Missing cannot be instantiated: .*Missing"),
        ("Noise", ("data.num_classes=1",), r"num_classes=1, but data.dataset has 2 classes \(sq"),
        ("Pictures", (), r"has no attribute classes: set data.num_classes"),
        (
            *("Noise", (f"data.validation._target_={HERE}.Pictures",)),
            r"data.validation have dtype uint8, .*dataset float64",
        ),
        ("Noise", ("data.transforms=5",), "data.transforms=5 must be a list"),
        ("Noise", ("data.transforms=[relu]",), "data.transforms: relu has no class: write it as"),
        ("Noise", ("data.transforms=[{_target_: a.B}]",), "a.B cannot be instantiated"),
        ("Noise", ("data.transforms=[{_target_: pathlib.Path}]",), "PosixPath, which is not call"),
        ("Pictures", ("data.num_classes=1",), "the class is 1, expected 0 to 0"),
        ("Noise", ("data.channels=1",), "data.channels=1, but the images .* have 3"),
        ("Noise", ("data.image_size=[4]",), "expected channels and 1 spatial dims"),
        ("Noise", ("data.keys=[0,5]",), "has 2 parts, but data.keys"),
        (
            *("Files", ("data.num_classes=2",)),
            r"^sample 0 of data.dataset \(.*\.Files\) cannot be read: .*'gone-0.png' \("
            r".*own_datasets\.py, line \d+\): check the path, or leave the sample out$",
        ),
        (
            *("Files", ("data.dataset.table=gone.csv",)),
            r"^data.dataset: .*\.Files cannot be instantiated: .*'gone.csv' \("
            r".*own_datasets\.py, line \d+\)$",
        ),
    ],
)
def test_what_cannot_be_is_refused(kind, words, sentence):
    with pytest.raises(ValueError, match=sentence):
        opened(kind, *words).train.read(1)


def test_numbers_are_targets():
    sources = opened("Numbers", task="regression")
    assert sources.num_classes == 2
    with pytest.raises(ValueError, match=r"data.num_classes=3, but the targets .* have 2 numbers"):
        opened("Numbers", "data.num_classes=3", task="regression")


def test_words_of_the_command_line():
    known = ["data=dataset", f"data.dataset._target_={HERE}.Noise", "data.dataset.count=3"]
    check_overrides([rewritten(word) for word in [*known, "data.validation.split=val"]])
    for wrong in ("data.dataset.counts=3", "data.validation.splits=val"):
        with pytest.raises(ValueError, match=f"{wrong.partition('=')[0]} is unknown to .*Noise"):
            check_overrides([rewritten(word) for word in [*known, wrong]])
    with pytest.raises(ValueError, match=r"not set: add data\.dataset\._target_=package\.Class"):
        check_overrides([rewritten(word) for word in ("data=dataset", "data.dataset.count=3")])


def test_what_cannot_be_repeated_is_told(caplog):
    check_same_samples(opened("Noise").train, SingleProcess(), split=False)
    assert not caplog.text
    check_same_samples(opened("Unrepeatable").train, SingleProcess(), split=False)
    assert "cannot be seeded" in caplog.text


def shards(folder: Path) -> str:
    with ShardWriter(folder / "set", ["a", "b"]) as writer:
        for number in range(3):
            writer.add(np.full((4, 5, 3), number, np.uint8), number % 2, "train")
    return f"data.dataset.path={folder / 'set'}"


def test_a_source_that_reads_by_boxes_is_taken_as_it_is(tmp_path):
    data = config("spatialdl.data.ShardDataset", shards(tmp_path)).data
    sources = open_sources(data, 0)
    assert isinstance(sources.train, ShardDataset)
    assert (sources.num_classes, sources.image_size) == (2, (4, 5))
    with pytest.raises(ValueError, match=r"has no masks, but task=segmentation needs them"):
        open_sources(data, 0, "segmentation")


def losses(folder: Path, *more: str, steps: int) -> list[float]:
    words = ["data.batch_size=3", f"trainer.max_steps={steps}", "data.dataset.count=8", *more]
    words += ["model.width=2", "data.validation.split=val"]
    fit(Trainer(config(f"{HERE}.OwnGenerator", *words), SingleProcess()), folder)
    return summary(folder)["loss"]


def test_a_run_that_was_stopped_goes_on_with_the_same_samples(tmp_path):
    whole = losses(tmp_path / "whole", steps=5)
    losses(tmp_path / "part", steps=4)  # in the second epoch
    again = losses(tmp_path / "again", f"ckpt_path={tmp_path / 'part'}", steps=5)
    assert again == whole
    more = f"ckpt_path={tmp_path / 'part'}", "data.dataset.count=9"
    with pytest.raises(ValueError, match=r"data.samples=8, but this run has data.samples=9"):
        losses(tmp_path / "other", *more, steps=6)


def test_dicts_and_random_crops_of_monai(monkeypatch):
    monai = pytest.importorskip("monai.transforms")
    data = pytest.importorskip("monai.data")

    def volumes() -> object:
        images = [np.random.default_rng(n).random((1, 12, 13, 14), np.float32) for n in range(4)]
        samples = [{"image": one, "label": (one > 0.5).astype(np.float32)} for one in images]
        keys = ["image", "label"]
        crop = monai.RandCropByPosNegLabeld(keys, "label", (8, 9, 10), num_samples=1)
        flip = monai.RandFlipd(keys, prob=0.5, spatial_axis=0)
        noise = monai.RandGaussianNoised(["image"], prob=1.0)
        tensors = monai.EnsureTyped(keys)
        return data.Dataset(samples, monai.Compose([tensors, crop, flip, noise]))

    module = ModuleType("own_monai")
    module.volumes = volumes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_monai", module)
    words = ("data.num_classes=2", "data.image_size=[8,9,10]")
    sources, other = (
        open_sources(config("own_monai.volumes", *words).data, 3, "segmentation") for _ in range(2)
    )
    assert (sources.image_size, sources.channels) == ((8, 9, 10), 1)
    box = (2, 7, 0, 9, 3, 10)
    wholes = []
    for epoch, sample in ((0, 1), (1, 1), (0, 3)):
        whole = other.train.read(sample, epoch=epoch)
        wholes.append(whole)
        assert np.array_equal(sources.train_views.read(epoch, sample, box), whole[2:7, :, 3:])
        mask = sources.train_views.read_mask(epoch, sample, box)
        assert np.array_equal(mask, other.train.read_mask(sample, epoch=epoch)[2:7, :, 3:])
    assert not np.array_equal(wholes[0], wholes[1])


def test_transforms_are_named_by_the_configuration():
    noise = "data.transforms=[{_target_: torch.nn.Hardtanh, min_val: 0.0, max_val: 0.5}]"
    sources = opened("Noise", noise, "data.validation.split=val")
    assert (sources.train.read(0).min(), sources.train.read(0).max()) == (0, 0.5)
    assert sources.validation.read(0).max() > 0.5
    with pytest.raises(
        ValueError, match=r"data.transforms is a key of data=dataset, but data=shards"
    ):
        check_overrides(["data=shards", "data.path=x", "data.transforms=[]"])


def test_shards_are_a_data_set_too_where_transforms_want_whole_images(tmp_path):
    words = shards(tmp_path), "data.transforms=[{_target_: numpy.negative}]"
    with pytest.raises(ValueError, match=r"data\.transforms: numpy\.negative cannot"):
        open_sources(config("spatialdl.data.ShardDataset", *words).data, 0)
    words = words[0], f"data.transforms=[{{_target_: {HERE}.Inverted}}]"
    sources = open_sources(config("spatialdl.data.ShardDataset", *words).data, 0)
    assert sources.train.read(2).max() == 253
    assert (sources.names, sources.train.labels.tolist()) == (("a", "b"), [0, 1, 0])
