from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.data.synthetic import SyntheticDataset

sizes = st.integers(1, 3).flatmap(lambda dims: st.tuples(*[st.integers(1, 40 // dims)] * dims))
"""Of signals, images and volumes."""


@given(sizes, st.integers(1, 20), st.integers(0, 3), st.data())
def test_any_box_is_the_slice_of_the_whole(size, channels, sample, data):
    images = SyntheticDataset(4, size, channels=channels, seed=5)
    ends = [sorted(data.draw(st.integers(0, n)) for _ in range(2)) for n in size]
    whole = images.read(sample)
    assert (whole.dtype, whole.shape) == (np.uint8, (*size, channels))
    box = images.read(sample, tuple(bound for pair in ends for bound in pair))
    assert (box == whole[tuple(slice(*pair) for pair in ends)]).all()


@pytest.mark.parametrize("size", [(4096,), (12, 16, 20)])
def test_signals_and_volumes_have_noise_of_their_own_everywhere(size):
    image = SyntheticDataset(1, size, channels=1).read(0)[..., 0].astype(float)
    for dim in range(image.ndim):
        for step in (1, 2):
            neighbours = np.roll(image, step, dim)
            assert (image == neighbours).mean() < 0.05


def test_images_follow_from_seed_and_sample():
    def image(seed, sample):
        return SyntheticDataset(4, (16, 16), seed=seed).read(sample)

    assert (image(0, 0) == image(0, 0)).all()
    for other in (image(1, 0), image(0, 1)):
        assert (image(0, 0) != other).mean() > 0.9


def test_every_pixel_and_channel_has_noise_of_its_own():
    image = SyntheticDataset(1, (64, 64), channels=11).read(0).astype(float)
    pixels = (image - image.mean((0, 1))).reshape(-1, 11)
    stripes_only = np.corrcoef(pixels.T)[~np.eye(11, dtype=bool)]
    assert stripes_only.max() < 0.6  # they share the stripes, not the noise
    assert len(np.unique(image)) > 100


def test_labels_are_the_classes_in_turn():
    images = SyntheticDataset(7, (4, 4), num_classes=3)
    assert images.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert images.classes == ["0", "1", "2"]
    assert (len(images), images.image_size(0), images.channels) == (7, (4, 4), 3)


def spectrum(image: np.ndarray) -> np.ndarray:
    grey = image.mean(-1) - image.mean()
    return np.abs(np.fft.fft2(grey)) / grey.size


@pytest.mark.parametrize("size", [(64, 64), (48, 96)])
def test_the_class_is_the_direction_of_the_stripes(size):
    """The nearest class-mean spectrum classifies nearly all images."""
    classes, each = 4, 8
    images = SyntheticDataset(classes * each, size, num_classes=classes, seed=2)
    spectra = np.stack([spectrum(images.read(n)) for n in range(len(images))])
    known, asked = np.split(spectra, 2)
    means = np.stack([known[c::classes].mean(0) for c in range(classes)])
    distances = ((asked[:, None] - means) ** 2).sum((2, 3))
    assert (distances.argmin(1) == images.labels[len(known) :]).mean() > 0.9


def test_the_stripes_are_equally_wide_whatever_the_size():
    """So the class is seen at large scale only, where a crop of the image does not do."""
    for size in (64, 128):
        found = spectrum(SyntheticDataset(1, (size, size), seed=1).read(0))
        found[0, 0] = 0
        row, col = np.unravel_index(found.argmax(), found.shape)
        assert (int(row), min(int(col), size - int(col))) == (0, 6)


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"image_size": (0, 4)}, {"num_classes": 0}, {"channels": 0}]
)
def test_nothing_of_a_kind_is_refused_with_the_values(wrong):
    with pytest.raises(ValueError, match="at least 1 sample, pixel, class and channel") as error:
        SyntheticDataset(**{"samples": 2, "image_size": (4, 4)} | wrong)
    (key, value), *_ = wrong.items()
    assert f"{key}={list(value) if isinstance(value, tuple) else value}" in str(error.value)
