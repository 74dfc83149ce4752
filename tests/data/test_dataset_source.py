from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from spatialdl.data.dataset_source import DatasetSource
from spatialdl.data.sample_forms import SampleForm
from tests.data import own_datasets as own

BOX = (3, 17, 2, 11)


def test_a_box_is_that_of_the_whole_sample_in_any_order():
    source, other = (DatasetSource(own.Noise(), SampleForm(), seed=3) for _ in range(2))
    whole = {(e, n): other.at(e).read(n) for e in (0, 1) for n in (4, 2, 0)}
    for (epoch, number), pixels in reversed(whole.items()):
        assert np.array_equal(source.at(epoch).read(number, BOX), pixels[3:17, 2:11])
        assert int(source.target(epoch, number)) == number % 2
    assert not np.array_equal(whole[0, 2], whole[1, 2])
    assert not np.array_equal(DatasetSource(own.Noise(), SampleForm(), seed=4).read(2), whole[0, 2])
    assert (source.channels, source.dtype, source.image_size(1)) == (3, np.float64, (21, 18))


def test_generators_of_its_own_are_seeded_also_after_a_copy():
    source = DatasetSource(own.OwnGenerator(), SampleForm(), seed=3)
    before = source.read(5)
    source.read(6)
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(copy.read(5), before)
    assert np.array_equal(source.read(5), before)


def test_masks_and_images_of_a_sample_belong_together():
    source = DatasetSource(own.Masks(), SampleForm("segmentation"))
    for epoch in (0, 1):
        image, mask = source.at(epoch).read(1, BOX), source.at(epoch).read_mask(1, BOX)
        assert np.array_equal(mask, image[..., 0] > 0.5)
    assert int(source.target(0, 1)) == -1
    with pytest.raises(ValueError, match="has no masks"):
        DatasetSource(own.Noise(), SampleForm()).read_mask(0)


def test_what_was_read_may_be_changed():
    source = DatasetSource(own.Noise(), SampleForm())
    source.read(0)[:] = 0
    assert source.read(0).any()


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


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ((image(1, 5, 6), 0), "sample 1 of set: the image has 1 channels, the first sam"),
        ((image(3, 5, 6, dtype=torch.uint8), 0), "the image has type uint8, the first"),
        ((image(3, 5, 7), 0), r"the image is 5 x 7, expected 5 x 6.*data.image_size=\[rows,col"),
        ((image(3, 5, 6, 7), 0), "expected channels and 2 spatial dims"),
        (
            (image(3, 5, 6), 2),
            r"the class is 2, expected 0 to 1 \(2 classes\); set data.num_classes",
        ),
        ((image(3, 5, 6), -1), "the class is -1, expected 0 to 1"),
    ],
)
def test_samples_unlike_the_first_are_refused(second, sentence):
    source = DatasetSource(own.Given((image(3, 5, 6), 1), second), SampleForm(), name="set")
    source.expect(2, (5, 6))
    source.read(0)
    with pytest.raises(ValueError, match=sentence):
        source.read(1)


def test_masks_of_classes_that_there_are_not_are_refused():
    sample = image(1, 2, 3), torch.tensor([[0, 1, 255], [0, 0, 2]])
    source = DatasetSource(own.Given(sample), SampleForm("segmentation"), name="set")
    source.expect(3, None)
    with pytest.raises(ValueError, match=r"sample 0 of set: the mask has a pixel of class 2, expe"):
        source.expect(2, None)


def test_numbers_of_another_count_are_refused():
    samples = (image(1, 2, 3), [1.0, 2.0]), (image(1, 2, 3), [1.0])
    source = DatasetSource(own.Given(*samples), SampleForm("regression"), name="set")
    with pytest.raises(ValueError, match="the target has 1 values, the first sample has 2"):
        source.target(0, 1)


def test_a_digest_tells_whether_samples_are_made_alike():
    same = DatasetSource(own.Noise(), SampleForm())
    assert same.digest(0, 0) == same.digest(0, 0) != same.digest(1, 0)
    other = DatasetSource(own.Unrepeatable(), SampleForm())
    assert other.digest(0, 0) != other.digest(0, 0)
