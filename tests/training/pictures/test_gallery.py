from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from torch import nn

from spatialdl.data import ShardWriter
from spatialdl.training.parts import RunParts
from spatialdl.training.pictures import gallery, thumbnails
from spatialdl.training.pictures.gallery import Example, labelled
from spatialdl.training.pictures.thumbnails import drawn_signal, overlaid
from tests.fitting import make_parts, validated
from tests.training.pictures.whole_volumes import orthogonal_slices

TINY = [
    *("model.width=2", "data.image_size=[40,36]", "data.num_classes=3", "device=cpu"),
    *("data.validation_samples=11", "data.batch_size=4", "trainer.max_steps=1"),
]


def looked_at(*overrides: str, tiny: Sequence[str] = TINY) -> tuple[RunParts, list[Example]]:
    ours = make_parts(*tiny, *overrides)
    validated(ours)
    return ours, ours.validation.examples()


def test_the_worst_and_the_best_of_labels():
    for task in ("multilabel", "regression"):
        errors = [one.error for one in looked_at(f"task={task}")[1]]
        assert len(errors) == 8
        assert errors == sorted(errors, reverse=True)
    ours, examples = looked_at()
    values, labels = ours.validation._predictions.values, ours.validation._predictions.labels
    errors = {n: float(1 - values[n, labels[n]]) for n in range(11)}
    order = sorted(errors, key=lambda n: -errors[n])
    assert [one.sample for one in examples] == order[:4] + order[-4:]
    assert [one.error for one in examples] == [errors[one.sample] for one in examples]
    first = examples[0]
    best = int(values[first.sample].argmax())
    assert first.title.startswith(f"true {labels[first.sample]}, predicted {best} (")
    for one in examples:
        np.testing.assert_array_equal(
            one.pictures["image"], ours.sources.validation.read(one.sample)
        )


def test_masks_lie_over_their_images():
    ours, examples = looked_at("model=unet", "model.width=4", "model.depth=1")
    assert len(examples) == 8
    for one in examples:
        mask = ours.sources.validation.read_mask(one.sample)
        image = ours.sources.validation.read(one.sample)
        np.testing.assert_array_equal(one.pictures["image"], image)
        np.testing.assert_array_equal(one.pictures["truth"], overlaid(image, mask.astype(int)))
        assert one.title == f"{1 - one.error:.1%} of pixels correct"


VOLUMES = ["data.image_size=[10,20,16]", *TINY[2:]]


def test_volumes_show_three_slices():
    words = ["model=unet3d", "model.width=4", "model.depth=1"]
    ours, examples = looked_at(*words, tiny=VOLUMES)
    assert len(examples) == 8
    for one in examples:
        volume = ours.sources.validation.read(one.sample)[..., 0]
        mask = ours.sources.validation.read_mask(one.sample)
        for name, classes in (("image", None), ("truth", mask)):
            expected = orthogonal_slices(volume, classes=classes, side=200)
            np.testing.assert_array_equal(one.pictures[name], expected)
        assert (
            one.pictures["predicted"].shape == expected.shape == (200, 160 + 4 + 160 + 4 + 200, 3)
        )
        assert one.title == f"{1 - one.error:.1%} of voxels correct"
        assert labelled(one).shape == (3 * 200 + 2 * 4 + 16, 528, 3)


@pytest.mark.parametrize("side", [320, 7])  # as they are, and shrunk to (2, 7, 5) voxels
def test_slices_are_drawn_in_millimetres(side, tmp_path, monkeypatch):
    monkeypatch.setattr(thumbnails, "SIDE", side)
    rng = np.random.default_rng(0)
    with ShardWriter(tmp_path, classes=["a", "b"], kind="volumes") as writer:
        for number in range(4):
            volume = rng.integers(0, 256, (4, 10, 8), np.uint8)
            split = "train" if number < 2 else "val"
            writer.add(volume, label=number % 2, split=split, spacing=(5.0, 1.0, 1.0))
    tiny = ["device=cpu", *TINY[5:], "data=shards", f"data.path={tmp_path}"]
    network = "++model._target_=tests.training.pictures.test_gallery.mean_of_voxels"
    ours, examples = looked_at(network, "~model.width", tiny=tiny)
    assert len(examples) == 2
    for one in examples:
        picture = one.pictures["image"]
        volume = ours.sources.validation.read(one.sample)[..., 0]
        expected = orthogonal_slices(volume, (5.0, 1.0, 1.0), side=200)
        assert picture.shape == expected.shape
        assert side < 10 or (picture == expected).all()


def mean_of_voxels(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(in_channels, num_classes))


def test_signals_are_lines():
    network = "++model._target_=tests.training.pictures.test_gallery.classes_of_places"
    words = [network, "~model.width", "task=segmentation", "data.image_size=[300]"]
    ours, examples = looked_at(*words, tiny=TINY[2:])
    assert len(examples) == 8
    for one in examples:
        signal = ours.sources.validation.read(one.sample)
        mask = ours.sources.validation.read_mask(one.sample)
        np.testing.assert_array_equal(one.pictures["image"], drawn_signal(signal))
        np.testing.assert_array_equal(one.pictures["truth"], drawn_signal(signal, mask))
        assert one.title == f"{1 - one.error:.1%} of positions correct"


def classes_of_places(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Conv1d(in_channels, num_classes, 3, padding=1)


def test_class_0_and_pixels_without_a_class_are_left_as_they_are():
    image = np.full((1, 3, 3), 100, np.uint8)
    mixed = overlaid(image, np.array([[0, 1, 255]]))
    assert mixed[0, 0].tolist() == mixed[0, 2].tolist() == [100] * 3
    assert mixed[0, 1].tolist() != [100] * 3


def test_many_maps_are_looked_at_here_and_there(monkeypatch):
    monkeypatch.setattr(gallery, "CANDIDATES", 5)
    _, examples = looked_at("model=unet", "model.width=4", "model.depth=1")
    assert sorted(one.sample for one in examples) == [0, 2, 4, 6, 8]


def test_a_title_stands_above_the_pictures():
    pixels = np.full((200, 400, 3), 7, np.uint8)
    picture = labelled(
        Example(3, "sample 3", "true a, predicted b ✓", 0.5, {"image": pixels, "truth": pixels})
    )
    assert picture.shape == (216, 800, 3)
    assert (picture[16:] == 7).all()
    assert picture[:16].min() < 50


def test_examples_are_named_by_slide_and_place(tmp_path):
    with ShardWriter(tmp_path, classes=["a", "b"]) as writer:
        for number in range(6):
            image = np.full((40, 36, 3), 40 * number, np.uint8)
            split = "train" if number == 0 else "val"
            where = {"slide": "s é", "xy": (number * 7, 3)} if number != 5 else {}
            writer.add(image, label=number % 2, split=split, **where)
    tiny = [word for word in TINY if "validation_samples" not in word]
    _, examples = looked_at("data=shards", f"data.path={tmp_path}", tiny=tiny)
    found = {example.sample: example.name for example in examples}
    expected = {number - 1: f"s é, x={number * 7}, y=3" for number in range(1, 5)}
    assert found == {**expected, 4: "sample 5"}  # as in predictions.csv
    _, drawn = looked_at()
    assert all(example.name == f"sample {example.sample}" for example in drawn)
