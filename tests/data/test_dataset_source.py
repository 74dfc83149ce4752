"""A user's own data set: forms of samples, seeded generators, and boxes of samples."""

from __future__ import annotations

import math
import pickle
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from spatialdl.data.dataset_source import DatasetSource
from spatialdl.data.sample_forms import SampleForm
from spatialdl.data.sample_generators import own_generators, seeded
from tests.data import own_datasets as own

BOX = (3, 17, 2, 11)
IMAGE = torch.arange(24, dtype=torch.float32).view(2, 3, 4)


def test_images_of_all_kinds_have_their_channels_last():
    form, first = SampleForm(), SampleForm(channel_dim="first")
    array = IMAGE.numpy()  # (rows, columns, channels), as it is an array
    assert np.array_equal(form.pixels(IMAGE), IMAGE.permute(1, 2, 0).numpy())
    assert np.array_equal(form.pixels(array), array)
    assert np.array_equal(first.pixels(array), form.pixels(IMAGE))
    assert form.pixels(np.ones((3, 4), ">u2")).dtype == np.dtype("<u2")
    for one, given, shape in [
        (form, IMAGE[0], (3, 4, 1)),
        (form, torch.zeros(2, 5, 6, 7), (5, 6, 7, 2)),
        (SampleForm(dims=3), np.zeros((5, 6, 7)), (5, 6, 7, 1)),
        (SampleForm(dims=1), torch.zeros(2, 9), (9, 2)),
        (first, torch.zeros(20, 20, 3), (20, 3, 20)),  # channels that are many may be meant
    ]:
        assert one.pixels(given).shape == shape


@pytest.mark.parametrize(
    ("mode", "channels", "dtype"),
    [
        *(("RGB", 3, "uint8"), ("L", 1, "uint8"), ("RGBA", 4, "uint8"), ("1", 1, "uint8")),
        *(("P", 3, "uint8"), ("CMYK", 3, "uint8"), ("F", 1, "float32"), ("I;16", 1, "uint16")),
    ],
)
def test_pictures_of_pillow(mode, channels, dtype):
    picture = Image.new("L" if mode == "I;16" else "RGB", (5, 4), 255 if mode == "I;16" else "red")
    pixels = SampleForm().pixels(picture.convert(mode))
    assert (pixels.shape, pixels.dtype) == ((4, 5, channels), dtype)


def test_pairs_and_dicts():
    form, both = SampleForm(), {"image": IMAGE, "label": 1, "mask": 2}
    for given in (
        *((IMAGE, 1), [IMAGE, 1], {"img": IMAGE, "labels": 1, "path": "x"}),
        *([{"image": IMAGE, "label": 1}], both),
    ):
        assert form.parts(given) == (IMAGE, 1)
    assert SampleForm("segmentation").parts(both)[1] == 2
    assert SampleForm(keys=("mask", "label")).parts(both) == (2, 1)
    assert SampleForm(keys=(2, 0)).parts((5, 6, 7)) == (7, 5)


def test_classes_numbers_and_masks():
    form = SampleForm()
    for given in (2, np.int16(2), torch.tensor(2), torch.tensor([2]), np.array([[2]])):
        target = form.decoded((IMAGE, given)).target
        assert (target.shape, target.dtype, int(target)) == ((), np.int64, 2)
    assert int(form.decoded((IMAGE, True)).target) == 1
    several = SampleForm("multilabel").decoded((IMAGE, [1, 0, -1])).target
    assert several[:2].tolist() == [1, 0]
    assert math.isnan(several[2])
    one = SampleForm("regression").decoded((IMAGE, 2.5)).target
    assert (one.tolist(), one.dtype) == ([2.5], np.float64)
    wanted = np.array([[0, 1, 2, 255]] * 3, np.uint8)
    for mask in (
        *(wanted, torch.from_numpy(wanted), torch.from_numpy(wanted)[None].float()),
        *(wanted[..., None].astype(np.int32), Image.fromarray(wanted)),
    ):
        target = SampleForm("segmentation").decoded((IMAGE, mask)).target
        assert target.dtype == np.uint8
        assert np.array_equal(target, wanted)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("task", "sample", "sentence"),
    [
        ("classification", IMAGE, r"it is a Tensor of shape \(2, 3, 4\), expected \(image, target"),
        ("classification", None, "it is None, expected"),
        ("classification", (IMAGE, 1, 2), r"has 3 parts, .*such as data\.keys=\[0,1\]"),
        ("classification", {"x": 1}, r"no image under image, img, .* keys are x: set data\.keys="),
        ("classification", {"image": IMAGE, "y": 1}, "no target under label,"),
        ("classification", [{"image": IMAGE}] * 2, r"list of 2 samples.*num_samples=1"),
        ("classification", ("a.png", 1), "the image is a str, expected a tensor"),
        ("classification", (zeros(3, 4, dtype=torch.int64), 1), "image has type int64.*uint16"),
        ("classification", (zeros(3, 4, dtype=torch.bfloat16), 1), "type bfloat16"),
        ("classification", (zeros(3), 1), "expected 2 spatial dims"),
        ("classification", (zeros(3, 0, 4), 1), "has shape"),
        ("classification", (zeros(20, 20, 3), 1), r"a tensor.*set data\.channel_dim=last"),
        ("classification", (np.zeros((3, 20, 20)), 1), r"an array.*set data\.channel_dim=first"),
        ("classification", (IMAGE, [0, 1]), r"target has shape \(2,\).*argmax of a one-hot"),
        ("classification", (IMAGE, 1.5), "target is .*1.5.*a whole number from 0"),
        ("classification", (IMAGE, "cat"), r"the target is a str \('cat'\)"),
        ("multilabel", (IMAGE, [0, 2]), "has the value 2, task=multilabel takes 1 .*0"),
        ("regression", (IMAGE, [math.inf]), "infinite values: mark unknown values with NaN"),
        ("regression", (IMAGE, np.ones((1, 1))), "takes a vector of numbers"),
        ("regression", (IMAGE, []), "expected numbers"),
        ("segmentation", (IMAGE, zeros(2, 3, 4)), "which is 2 channels.*argmax"),
        ("segmentation", (IMAGE, torch.full((3, 4), 0.5)), "non-integer values"),
        ("segmentation", (IMAGE, torch.full((3, 4), -1)), "values, down to -1: mark .* with 255"),
        ("segmentation", (IMAGE, zeros(4, 4)), r"mask has shape \(4, 4\), its image has 3 x"),
        ("segmentation", (IMAGE, 1), "the mask is a int, expected a tensor"),
    ],
)
def test_what_has_no_form_is_refused(task, sample, sentence):
    with pytest.raises(ValueError, match=sentence):
        SampleForm(task).decoded(sample)


def draws() -> list[float]:
    return [float(torch.rand(())), np.random.rand(), random.random()]


def test_common_generators_follow_from_seed_epoch_and_sample_and_go_on_as_before():
    found = {}
    for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]:
        with seeded([], *key):
            one = draws()
        assert found.setdefault(key, one) == one
    assert len({tuple(one) for one in found.values()}) == 4

    def failing() -> None:
        with seeded([], 1, 2, 3):
            draws()
            raise KeyError

    rows = []
    for disturbed in (False, True):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(5)
        rows.append(draws())
        if disturbed:
            with pytest.raises(KeyError):
                failing()
        rows.append(draws())
    assert rows[:2] == rows[2:]


class Monai:
    def __init__(self) -> None:
        self.inner = np.random.RandomState()

    def set_random_state(self, seed: int) -> None:
        self.inner = np.random.RandomState(seed)


class Albumentations(Monai):
    """Of version 2: its state is two generators, and a number is set by another method."""

    def set_random_state(self, first: np.random.Generator, second: random.Random) -> None:
        raise AssertionError

    def set_random_seed(self, seed: int) -> None:
        self.inner = np.random.RandomState(seed)


def test_generators_of_objects_are_found_wherever_they_lie():
    kept = SimpleNamespace(
        a=[np.random.default_rng(), (random.Random(),)],
        b={"c": partial(max, torch.Generator())},
        d=SimpleNamespace(legacy=np.random.RandomState()),
        monai=Monai(),
        albumentations=Albumentations(),
        files=["x"] * 10_000,
        module=np,
    )
    kept.itself = kept

    def numbers() -> list[float]:
        with seeded(own_generators(kept), 3, 1, 4):
            generator = kept.b["c"].args[0]
            return [
                *(kept.a[0].random(), kept.a[1][0].random(), kept.d.legacy.random()),
                *(kept.monai.inner.random(), kept.albumentations.inner.random()),
                float(torch.rand((), generator=generator)),
            ]

    first = numbers()
    assert len(set(first)) == 6
    assert numbers() == first
    assert len(own_generators(kept)) == 6


def test_a_box_is_that_of_the_whole_sample_in_any_order():
    source, other = (DatasetSource(own.Noise(), SampleForm(), seed=3) for _ in range(2))
    whole = {(e, n): other.at(e).read(n) for e in (0, 1) for n in (4, 2, 0)}
    for (epoch, number), pixels in reversed(whole.items()):
        assert np.array_equal(source.at(epoch).read(number, BOX), pixels[3:17, 2:11])
        assert int(source.target(epoch, number)) == number % 2
    assert not np.array_equal(whole[0, 2], whole[1, 2])
    assert not np.array_equal(DatasetSource(own.Noise(), SampleForm(), seed=4).read(2), whole[0, 2])
    assert (source.channels, source.dtype, source.image_size(1)) == (3, np.float64, (21, 18))
    source.read(0)[:] = 0  # what was read may be changed
    assert source.read(0).any()


def test_generators_of_its_own_are_seeded_also_after_a_copy():
    source = DatasetSource(own.OwnGenerator(), SampleForm(), seed=3)
    before = source.read(5)
    source.read(6)
    for one in (pickle.loads(pickle.dumps(source)), source):
        assert np.array_equal(one.read(5), before)
    assert source.digest(0, 0) == source.digest(0, 0) != source.digest(1, 0)
    other = DatasetSource(own.Unrepeatable(), SampleForm())
    assert other.digest(0, 0) != other.digest(0, 0)


def test_masks_and_images_of_a_sample_belong_together():
    source = DatasetSource(own.Masks(), SampleForm("segmentation"))
    for epoch in (0, 1):
        image, mask = source.at(epoch).read(1, BOX), source.at(epoch).read_mask(1, BOX)
        assert np.array_equal(mask, image[..., 0] > 0.5)
    assert int(source.target(0, 1)) == -1
    with pytest.raises(ValueError, match="has no masks"):
        DatasetSource(own.Noise(), SampleForm()).read_mask(0)


def test_labels_are_read_or_given():
    source = DatasetSource(own.Noise(), SampleForm())
    assert (source.no_labels.shape, source.no_labels.dtype) == ((0,), np.int64)
    assert source.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    source.labels = np.arange(7)
    assert source.labels[3] == 3
    numbers = DatasetSource(own.Numbers(), SampleForm("regression"))
    assert numbers.no_labels.shape == (0, 2)
    assert np.isnan(numbers.labels[:, 0]).tolist() == [False, True] + [False] * 5


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (own.Stream(), "set is an iterable data set, without samples by index"),
        (iter([1]), "set is an iterable data set"),
        (3, "set is a int, without samples by index"),
        (own.Given(), r"set has no samples \(its length is 0\)"),
        ({"train": 1, "test": 2}, "set is a dict with keys train, test; select one split"),
        (own.Given(torch.zeros(3, 4)), r"sample 0 of set: it is a Tensor of shape"),
    ],
)
def test_what_is_no_such_data_set_is_refused(dataset, sentence):
    with pytest.raises(ValueError, match=sentence):
        DatasetSource(dataset, SampleForm(), name="set")


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ((zeros(1, 5, 6), 0), "sample 1 of set: the image has 1 channels, the first sam"),
        ((zeros(3, 5, 6, dtype=torch.uint8), 0), "the image has type uint8, the first"),
        ((zeros(3, 5, 7), 0), r"the image is 5 x 7, expected 5 x 6.*data.image_size=\[rows,col"),
        ((zeros(3, 5, 6, 7), 0), "expected channels and 2 spatial dims"),
        ((zeros(3, 5, 6), 2), r"the class is 2, expected 0 to 1 \(2 classes\); set data.num_class"),
        ((zeros(3, 5, 6), -1), "the class is -1, expected 0 to 1"),
    ],
)
def test_samples_unlike_the_first_are_refused(second, sentence):
    source = DatasetSource(own.Given((zeros(3, 5, 6), 1), second), SampleForm(), name="set")
    source.expect(2, (5, 6))
    source.read(0)
    with pytest.raises(ValueError, match=sentence):
        source.read(1)


def test_classes_of_masks_and_counts_of_numbers_are_checked():
    sample = zeros(1, 2, 3), torch.tensor([[0, 1, 255], [0, 0, 2]])
    source = DatasetSource(own.Given(sample), SampleForm("segmentation"), name="set")
    source.expect(3, None)
    with pytest.raises(ValueError, match=r"sample 0 of set: the mask has a pixel of class 2, expe"):
        source.expect(2, None)
    samples = (zeros(1, 2, 3), [1.0, 2.0]), (zeros(1, 2, 3), [1.0])
    source = DatasetSource(own.Given(*samples), SampleForm("regression"), name="set")
    with pytest.raises(ValueError, match="the target has 1 values, the first sample has 2"):
        source.target(0, 1)
