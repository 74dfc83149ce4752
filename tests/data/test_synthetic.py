"""Drawn data: any box is that of the whole, all follows from the seed, classes can be learned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spatialdl.data.rare_tiles import KINDS, MARKED, RareTilesBag, draw_tile
from spatialdl.data.synthetic import SyntheticDataset, SyntheticMasks, SyntheticTargets

sizes = st.integers(1, 3).flatmap(lambda dims: st.tuples(*[st.integers(1, 45 // dims)] * dims))
"""Of signals, images and volumes."""


@settings(max_examples=25)
@given(st.sampled_from(["stripes", "masks", "targets"]), st.integers(0, 3), st.data())
def test_any_box_is_the_slice_of_the_whole(kind, sample, data):
    size = (19, 23) if kind == "targets" else data.draw(sizes)
    channels = data.draw(st.sampled_from([1, 3, 11]))
    images = {
        "stripes": lambda: SyntheticDataset(4, size, channels=channels, seed=5),
        "masks": lambda: SyntheticMasks(4, size, data.draw(st.integers(1, 12)), channels, seed=5),
        "targets": lambda: SyntheticTargets(4, size, 3, channels, 5, present=True),
    }[kind]()
    ends = [sorted(data.draw(st.integers(0, n)) for _ in range(2)) for n in size]
    box = tuple(bound for pair in ends for bound in pair)
    reads = [
        (images.read, (channels,)),
        *[(images.read_mask, ())] * (kind == "masks"),
    ]
    for read, tail in reads:
        whole = read(sample)
        assert (whole.dtype, whole.shape) == (np.uint8, (*size, *tail))
        assert (read(sample, box) == whole[tuple(slice(*pair) for pair in ends)]).all()


def test_all_follow_from_seed_and_sample():
    for least, draw in [
        (0.9, lambda seed, n: SyntheticDataset(4, (16, 16), seed=seed).read(n)),
        (0.1, lambda seed, n: SyntheticMasks(4, (64, 64), seed=seed).read_mask(n)),
        (0.1, lambda seed, n: RareTilesBag("s", 1, 6, 32, (0, n, seed)).read()),
    ]:
        assert (draw(0, 0) == draw(0, 0)).all()
        for other in (draw(1, 0), draw(0, 1)):
            assert (draw(0, 0) != other).mean() > least


def spectrum(image: np.ndarray) -> np.ndarray:
    grey = image.mean(-1) - image.mean()
    return np.abs(np.fft.fft2(grey)) / grey.size


@pytest.mark.parametrize("size", [(64, 64), (48, 96)])
def test_the_class_is_the_direction_of_the_stripes(size):
    """The nearest class-mean spectrum classifies nearly all images."""
    classes, each = 4, 8
    images = SyntheticDataset(classes * each, size, num_classes=classes, seed=2)
    assert images.labels.tolist() == [*range(4)] * 8
    assert (images.classes, len(images)) == (["0", "1", "2", "3"], 32)
    assert (images.image_size(0), images.channels, images.has_masks) == (size, 3, False)
    with pytest.raises(ValueError, match="no masks"):
        images.read_mask(0)
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
    ("make", "said"),
    [
        (lambda: SyntheticDataset(0, (4, 4)), "at least 1 sample, pixel, class .* samples=0"),
        (lambda: SyntheticDataset(2, (0, 4)), r"at least 1 .* image_size=\[0, 4\]"),
        (lambda: SyntheticDataset(2, (4, 4), num_classes=0), "at least 1 .* num_classes=0"),
        (lambda: SyntheticDataset(2, (4, 4), channels=0), "at least 1 .* channels=0"),
        (lambda: RareTilesBag("s", 0, 1, 32, (0,)), "at least 2 tiles of at least 24 pixels"),
        (lambda: RareTilesBag("s", 0, 16, 8, (0,)), "at least 2 tiles of at least 24 pixels"),
    ],
)
def test_what_cannot_be_drawn_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("images", "classes", "least", "most_of_background"),
    [
        (SyntheticMasks(4, (24, 28, 20), 3, seed=1), 3, 0.001, 0.99),
        (SyntheticMasks(16, (96, 80), num_classes=5), 5, 0.03, 0.8),
    ],
)
def test_all_classes_occur(images, classes, least, most_of_background):
    masks = np.stack([images.read_mask(sample) for sample in range(len(images))])
    shares = np.bincount(masks.ravel(), minlength=classes) / masks.size
    assert len(shares) == classes
    assert shares.min() > least
    assert 0.2 < shares[0] < most_of_background


@pytest.mark.parametrize("channels", [1, 3])
def test_a_pixel_shows_its_class_on_average_only(channels):
    images = SyntheticMasks(8, (64, 64), num_classes=2, channels=channels)
    pixels = np.concatenate([images.read(n)[..., 0].ravel() for n in range(8)]).astype(float)
    mask = np.concatenate([images.read_mask(n).ravel() for n in range(8)])
    dark, bright = pixels[mask == 0], pixels[mask == 1]
    assert bright.mean() - dark.mean() > 70
    assert dark.max() > bright.min()


def test_targets_follow_from_the_seed_are_in_range_and_show_in_the_image():
    assert set(np.unique(SyntheticTargets(5, (19, 23), 3, seed=2, present=True).labels)) == {0, 1}
    one, same, other = (SyntheticTargets(40, (32, 32), 1, seed=s, present=False) for s in (0, 0, 1))
    assert (one.labels.shape, one.labels.dtype) == ((40, 1), np.float64)
    assert 0 <= one.labels.min() < one.labels.max() < 1
    assert (one.labels == same.labels).all()
    assert not (one.labels == other.labels).any()
    contrast = [one.read(n)[..., 0].std() for n in range(40)]
    assert np.corrcoef(contrast, one.labels[:, 0])[0, 1] > 0.8


def test_two_tiles_of_a_slide_show_its_class_and_the_others_are_alike_in_both():
    cross, ring = (RareTilesBag("s", kind, 9, 32, (0, 0, 1)) for kind in (0, 1))
    np.testing.assert_array_equal(cross.read(2, 4), cross.read()[2:4])
    assert cross.read().shape == (9, cross.width)
    differs = (cross.read() != ring.read()).any(1)
    assert len(cross.marked) == MARKED
    assert np.flatnonzero(differs).tolist() == cross.marked.tolist()
    for kind in KINDS:
        marked, bare = (draw_tile(np.random.default_rng(1), 32, one) for one in (kind, None))
        assert (marked < 150).sum() > (bare < 150).sum() + 60
