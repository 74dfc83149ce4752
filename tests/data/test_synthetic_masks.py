from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.data.synthetic import SyntheticDataset
from spatialdl.data.synthetic_masks import SyntheticMasks

sizes = st.integers(1, 3).flatmap(lambda dims: st.tuples(*[st.integers(1, 60 // dims)] * dims))
"""Of signals, images and volumes."""


@given(sizes, st.integers(1, 12), st.integers(0, 3), st.data())
def test_any_box_is_the_slice_of_the_whole(size, classes, sample, data):
    images = SyntheticMasks(4, size, classes, seed=5)
    ends = [sorted(data.draw(st.integers(0, n)) for _ in range(2)) for n in size]
    box = tuple(bound for pair in ends for bound in pair)
    for read, tail in ((images.read, (3,)), (images.read_mask, ())):
        whole = read(sample)
        assert (whole.dtype, whole.shape) == (np.uint8, (*size, *tail))
        assert (read(sample, box) == whole[tuple(slice(*pair) for pair in ends)]).all()


def test_volumes_have_balls_of_all_classes():
    images = SyntheticMasks(4, (24, 28, 20), 3, seed=1)
    masks = np.stack([images.read_mask(sample) for sample in range(4)])
    shares = np.bincount(masks.ravel(), minlength=3) / masks.size
    assert (shares > 0.001).all()
    assert shares[0] < 0.99


def test_masks_follow_from_seed_and_sample():
    def mask(seed, sample):
        return SyntheticMasks(4, (64, 64), seed=seed).read_mask(sample)

    assert (mask(0, 0) == mask(0, 0)).all()
    for other in (mask(1, 0), mask(0, 1)):
        assert (mask(0, 0) != other).mean() > 0.1


def test_all_classes_occur_and_the_background_is_no_more_than_most():
    images = SyntheticMasks(16, (96, 80), num_classes=5)
    share = np.bincount(
        np.concatenate([images.read_mask(n).ravel() for n in range(16)]), minlength=5
    ) / (16 * 96 * 80)
    assert len(share) == 5
    assert share.min() > 0.03
    assert 0.2 < share[0] < 0.8


@pytest.mark.parametrize("channels", [1, 3])
def test_a_pixel_shows_its_class_on_average_only(channels):
    images = SyntheticMasks(8, (64, 64), num_classes=2, channels=channels)
    pixels = np.concatenate([images.read(n)[..., 0].ravel() for n in range(8)]).astype(float)
    mask = np.concatenate([images.read_mask(n).ravel() for n in range(8)])
    dark, bright = pixels[mask == 0], pixels[mask == 1]
    assert bright.mean() - dark.mean() > 70
    assert dark.max() > bright.min()


def test_images_with_labels_have_no_masks():
    assert not SyntheticDataset(1, (4, 4)).has_masks
    with pytest.raises(ValueError, match="no masks"):
        SyntheticDataset(1, (4, 4)).read_mask(0)
