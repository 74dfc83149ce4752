from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spatialdl.data.synthetic_fractals import SYSTEMS, SyntheticFractals, filled_places

SIZE = (40, 43, 37)


@settings(max_examples=25)
@given(st.integers(0, 3), st.sampled_from([1, 3]), st.data())
def test_any_box_is_the_slice_of_the_whole(sample, channels, data):
    volumes = SyntheticFractals(4, SIZE, 6, channels, seed=5)
    ends = [sorted(data.draw(st.integers(0, n)) for _ in range(2)) for n in SIZE]
    box = tuple(bound for pair in ends for bound in pair)
    for read, tail in ((volumes.read, (channels,)), (volumes.read_mask, ())):
        whole = read(sample)
        assert (whole.dtype, whole.shape) == (np.uint8, (*SIZE, *tail))
        assert (read(sample, box) == whole[tuple(slice(*pair) for pair in ends)]).all()


def test_volumes_follow_from_seed_and_sample():
    def mask(seed, sample):
        return SyntheticFractals(4, SIZE, seed=seed).read_mask(sample)

    assert (mask(0, 0) == mask(0, 0)).all()
    for other in (mask(1, 0), mask(0, 1)):
        assert (mask(0, 0) != other).mean() > 0.01


def test_all_classes_occur():
    volumes = SyntheticFractals(16, (48, 48, 48))
    masks = np.stack([volumes.read_mask(sample) for sample in range(16)])
    shares = np.bincount(masks.ravel(), minlength=6) / masks.size
    assert len(shares) == 6
    assert shares.min() > 0.001
    assert shares[0] < 0.97


def test_brightness_tells_no_class():
    """Objects are brighter than air, but balls are class 0, and all classes are as bright."""
    volumes = SyntheticFractals(32, (48, 48, 48))
    pixels = np.stack([volumes.read(n)[..., 0] for n in range(32)]).astype(float)
    masks = np.stack([volumes.read_mask(n) for n in range(32)])
    means = [pixels[masks == label].mean() for label in range(1, 6)]
    spreads = [pixels[masks == label].std() for label in range(1, 6)]
    assert max(means) - min(means) < min(spreads)
    assert min(means) > pixels[masks == 0].mean() + 60
    bright = pixels > 110
    assert 0.15 < (masks[bright] == 0).mean() < 0.8


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda one: one.name)
def test_the_maps_of_a_system_fill_what_is_drawn(system):
    """Points of the attractor are filled at any depth; the share falls as copies get smaller."""
    rng = np.random.default_rng(0)
    points = np.zeros((2000, 3))
    for _ in range(40):
        points = system.ratio * points + system.shifts[rng.integers(0, len(system.shifts), 2000)]
    assert (np.linalg.norm(points, axis=1) <= 1 + 1e-9).all()
    inward = points * (1 - 1e-9)  # the hull's corners are rounded
    anywhere = rng.uniform(-1, 1, (3, 20_000))
    shares = []
    for radius in (3.0, 9.0, 27.0, 81.0):
        assert filled_places(system, list(inward.T), radius).mean() > 0.99
        shares.append(filled_places(system, list(anywhere), radius).mean())
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 1.3 * shares[-1]


def test_finer_copies_in_larger_volumes():
    """The Menger sponge loses 7 of 27 cubes at every level."""
    sponge = SYSTEMS[1]
    lines = np.linspace(-1, 1, 82)[:-1] + 1 / 81
    places = [values.ravel() / np.sqrt(3) for values in np.meshgrid(*[lines] * 3)]
    for depth, radius in ((1, 7), (2, 18), (3, 55)):
        assert filled_places(sponge, places, radius).mean() == pytest.approx((20 / 27) ** depth)


@pytest.mark.parametrize(
    ("size", "classes", "said"),
    [
        ((40, 40), 4, r"synthetic fractals are volumes: data.image_size=\[40, 40\] must be"),
        (SIZE, 7, "data.num_classes=7 of fractals must be 2 to 6: the background, Sierpinski"),
        (SIZE, 1, "must be 2 to 6"),
    ],
)
def test_what_cannot_be_drawn_is_refused(size, classes, said):
    with pytest.raises(ValueError, match=said):
        SyntheticFractals(4, size, classes)
