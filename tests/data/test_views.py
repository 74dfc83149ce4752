"""Views of images and volumes: cropped, padded and augmented, of any box the same."""

from __future__ import annotations

import colorsys
import itertools
import math
from dataclasses import replace
from itertools import permutations, product

import hypothesis
import nibabel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter1d
from skimage.color import hed_from_rgb

from spatialdl.data.augmentation import pixel_changes
from spatialdl.data.augmentation.geometry import Draw, draw
from spatialdl.data.augmentation.pixel_changes import DARKEST, blur, radius_of, recolour
from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.data.format import UNLABELLED
from spatialdl.data.samples import VolumeSample
from spatialdl.data.views import Views
from spatialdl.data.volume_geometry import Geometry, VolumeTurn, orientation_of


class Images:
    """Images or volumes with masks, or signals; no box may reach beyond, or be empty."""

    has_masks = True
    classes = ("a", "b")

    def __init__(self, *sizes, dtype="uint8", channels=3):
        random = np.random.default_rng(0)
        white = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else 1
        self.images = [(random.random((*size, channels)) * white).astype(dtype) for size in sizes]
        self.masks = [random.integers(0, 2, size).astype(np.uint8) for size in sizes]
        self.labels = np.zeros(len(sizes), np.int64)
        self.channels = channels
        self.asked: list[tuple[int, ...]] = []

    def __len__(self):
        return len(self.images)

    def image_size(self, sample):
        return self.masks[sample].shape

    def read(self, sample, box=None):
        return self._cut(self.images[sample], box)

    def read_mask(self, sample, box=None):
        return self._cut(self.masks[sample], box)

    def _cut(self, image, box):
        cuts = list(zip(box[::2], box[1::2], strict=True))
        assert all(0 <= a < b <= n for (a, b), n in zip(cuts, image.shape, strict=False))
        self.asked.append(box)
        return image[tuple(slice(*cut) for cut in cuts)]


def whole(views, epoch=0, sample=0, mask=False):
    box = tuple(at for n in views.size for at in (0, n))
    return (views.read_mask if mask else views.read)(epoch, sample, box)


side = st.integers(1, 40)
settings = st.builds(
    Augmentation,
    crop=st.sampled_from(["centre", "random"]),
    flip=st.sampled_from([0.0, 0.5, 1.0]),
    rotate=st.booleans(),
    brightness=st.sampled_from([0.0, 0.4]),
    contrast=st.sampled_from([0.0, 0.4]),
    saturation=st.sampled_from([0.0, 0.4]),
    hue=st.sampled_from([0.0, 0.5]),
    stain=st.sampled_from([0.0, 0.2]),
    blur=st.sampled_from([0.0, 0.7, 5.0]),
)


@hypothesis.settings(max_examples=25)
@given(st.data(), st.tuples(side, side), st.tuples(side, side), settings)
def test_a_box_is_that_of_the_whole_view(data, stored, size, augmentation):
    dtype = data.draw(st.sampled_from(["uint8", "uint16", "float32"]))
    images, seed = Images(stored, dtype=dtype), data.draw(st.integers(0, 9))
    views = Views(images, size, None, augmentation, seed)
    cuts = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in size]
    epoch, box = data.draw(st.integers(0, 3)), tuple(at for cut in cuts for at in cut)
    cut = tuple(slice(*ends) for ends in cuts)
    found, mask = views.read(epoch, 0, box), views.read_mask(epoch, 0, box)
    assert found.dtype == dtype
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, whole(views, epoch)[cut], strict=True)
    np.testing.assert_array_equal(mask, whole(views, epoch, mask=True)[cut], strict=True)


@pytest.mark.parametrize("crop", ["centre", "random"])
@pytest.mark.parametrize(
    "size",
    [
        *((7, 8), (8, 7), (3, 5), (12, 4), (11, 13)),
        *((7,), (9,), (3,)),
        *((5, 6, 6), (9, 4, 4), (4, 11, 11), (3, 5, 8)),
    ],
)
def test_views_are_numpy_s(size, crop):
    """Crop or pad, mirror along all dims, turn in the plane of the slices; masks likewise."""
    stored = {1: (7,), 2: (7, 8), 3: (7, 8, 9)}[len(size)]
    source = Images(stored, dtype="int16", channels=2)
    turns = len(size) > 1 and (len(size) == 2 or size[1] == size[2])
    views = Views(source, size, -7, Augmentation(crop, 0.5, turns), seed=3)
    padded = np.pad(source.images[0], [(20, 20)] * len(size) + [(0, 0)], constant_values=-7)
    masks = np.pad(source.masks[0], 20, constant_values=UNLABELLED)
    random, seen = np.random.default_rng(0), set()
    for epoch in range(24):
        drawn = draw(views.augmentation, 3, epoch, 0)
        taken = (*size[:-2], *size[:-3:-1]) if drawn.turns % 2 else size
        begins = [
            20 + (int(part * (n - wanted + 1)) if part and n > wanted else (n - wanted) // 2)
            for part, n, wanted in zip(
                (drawn.crop or (0, 0, 0))[-len(size) :], stored, taken, strict=True
            )
        ]
        at = tuple(slice(b, b + n) for b, n in zip(begins, taken, strict=True))
        mirrors = (drawn.flip_slices, drawn.flip_rows, drawn.flip_cols)[-len(size) :]
        seen.add((*mirrors, drawn.turns))
        cuts = [sorted(random.integers(0, n + 1, 2).tolist()) for n in size]
        box = tuple(end for cut in cuts for end in cut)
        for plane, mask in ((padded, False), (masks, True)):
            expected = np.flip(plane[at], [dim for dim, flip in enumerate(mirrors) if flip])
            if turns:
                expected = np.rot90(expected, drawn.turns, axes=(len(size) - 2, len(size) - 1))
            found = whole(views, epoch, mask=mask)
            assert found.dtype == plane.dtype
            assert (found == expected).all()
            found = (views.read_mask if mask else views.read)(epoch, 0, box)
            assert (found == expected[tuple(slice(*cut) for cut in cuts)]).all()
        under = views.stored_box(epoch, 0, box)
        assert min(under[::2]) >= 0
        assert all(end <= n for end, n in zip(under[1::2], stored, strict=True))
    assert len(seen) > {1: 1, 2: 10, 3: 12 if turns else 6}[len(size)]


def test_without_augmentation_the_own_size_is_the_image_itself_and_no_more_is_read():
    images = Images((7, 9))
    views = Views(images, (7, 9))
    assert (whole(views) == images.images[0]).all()
    assert (whole(views, mask=True) == images.masks[0]).all()
    assert (views.read(5, 0, (2, 4, 1, 9)) == images.images[0][2:4, 1:9]).all()
    assert images.asked[-1] == (2, 4, 1, 9)
    for box in ((0, 8, 0, 9), (-1, 3, 0, 8), (5, 4, 0, 8)):
        with pytest.raises(ValueError, match="is not inside a view of 7 x 9"):
            views.read(0, 0, box)
    images = Images((40, 50))
    views = Views(images, (20, 20), augmentation=Augmentation("random", 0.5, True))
    for epoch in range(20):
        views.read(epoch, 0, (3, 8, 11, 18))
        row0, row1, col0, col1 = images.asked[-1]
        assert sorted((row1 - row0, col1 - col0)) == [5, 7]
    blurred = Views(images, (20, 20), augmentation=Augmentation(blur=1.0))
    blurred.read(0, 0, (5, 8, 5, 12))
    row0, row1, col0, col1 = images.asked[-1]
    assert 3 < row1 - row0 <= 9
    assert 7 < col1 - col0 <= 13


def test_the_background_is_white_of_volumes_0_or_ones_own():
    for images, size, background, expected in [
        (Images((3, 12)), (7, 6), None, 255),
        (Images((3, 12), dtype="uint16"), (7, 6), None, 65535),
        (Images((3, 12), dtype="float32"), (7, 6), None, 1),
        (Images((2, 2)), (4, 4), 7, 7),
        (Images((2, 2), dtype="float32"), (4, 4), 0.5, 0.5),
        (Images((1, 1, 1), dtype="int16"), (3, 3, 3), None, 0),
        (Images((1, 1, 1), dtype="int16"), (3, 3, 3), -1024, -1024),
        (Images((7,)), (9,), None, 0),
    ]:
        assert (whole(Views(images, size, background))[0] == expected).all()
    assert (whole(Views(Images((3, 12)), (7, 6)), mask=True)[[0, 1, 5, 6]] == UNLABELLED).all()
    for wrong in (256, -1, 0.5):
        with pytest.raises(ValueError, match=r"background=.* is not a value of uint8.*0 to 255"):
            whole(Views(Images((2, 2)), (4, 4), wrong))
    with pytest.raises(ValueError, match=r"data\.background=-40000 .* use -32768 to 32767"):
        Views(Images((1, 1, 1), dtype="int16"), (3, 3, 3), -40000).check_background()


@pytest.mark.parametrize(("dtype", "white"), [("uint16", 4095), ("float32", 0.25), ("float64", 9)])
def test_the_scale_of_pixels_is_white(dtype, white):
    dark = Images((3, 3), dtype=dtype)
    brightest = dark.images[0].max()
    dark.images[0] = (dark.images[0].astype(np.float64) / brightest * white).astype(dtype)
    padded = whole(Views(dark, (7, 6), white=white))
    assert (padded[:2] == white).all()
    with pytest.raises(ValueError, match=f"not a value of {dtype} images: use 0 to {white:g}, or"):
        whole(Views(dark, (7, 6), white + 1, white=white))
    # colours change as they do in images whose white is that of their type
    how = Augmentation(brightness=0.5, contrast=0.5, saturation=0.5, stain=0.1, blur=1.0)
    light = Images((3, 3), dtype="float64")
    light.images[0] = dark.images[0].astype(np.float64) / white
    for seed in range(5):
        found = whole(Views(dark, (7, 6), augmentation=how, seed=seed, white=white)) / white
        expected = whole(Views(light, (7, 6), augmentation=how, seed=seed))
        assert np.abs(found - expected).max() < (2 / white if dtype == "uint16" else 1e-5)


def test_changes_that_do_not_apply_are_refused_by_name():
    for name in ("brightness", "contrast", "saturation", "hue", "stain", "blur"):
        how = Augmentation(**{name: 0.1})
        with pytest.raises(ValueError, match=rf"augment\.{name} change colours .* are volumes"):
            Views(Images((3, 4, 5)), (3, 4, 5), augmentation=how)
        with pytest.raises(ValueError, match=rf"augment\.{name} change .* images of int16"):
            Views(Images((4, 5), dtype="int16"), (4, 5), augmentation=how)
    Views(Images((5, 5), channels=1), (5, 5), augmentation=Augmentation(brightness=1, blur=2))
    with pytest.raises(ValueError, match=r"data.augment.hue, data.augment.stain require images of"):
        Views(Images((5, 5), channels=4), (5, 5), augmentation=Augmentation(hue=0.1, stain=0.1))
    with pytest.raises(ValueError, match=r"augment\.rotate requires images, these are signals"):
        Views(Images((7,)), (7,), augmentation=Augmentation(rotate=True))


CODES = [
    "".join(letters) for axes in permutations(("LR", "PA", "IS")) for letters in product(*axes)
]


def affine_with(code: str) -> np.ndarray:
    """Slightly oblique, of (slice, row, column)."""
    affine = np.array([[0.1, 0.05, 0.02, 3], [0.05, 0.1, 0.03, 4], [0, 0.02, 0.1, 5]])
    for dim, letter in enumerate(code):
        axis = next(k for k, ends in enumerate(("LR", "PA", "IS")) if letter in ends)
        affine[axis, dim] = 2.0 if letter in "RAS" else -2.0
    return affine


def sample(affine, spacing) -> VolumeSample:
    known = {"mpp": None, "striped": False, "bands": (), "label": None, "split": None}
    return VolumeSample(
        *("0", 4, 5), **known, slide="", x=0, y=0, depth=3, spacing=spacing, affine=affine
    )


def test_orientations_are_those_of_nibabel():
    for code in CODES:
        affine = affine_with(code)
        assert orientation_of(affine) == code
        of_file = np.vstack([affine[:, [2, 1, 0, 3]], [0, 0, 0, 1]])
        assert "".join(nibabel.aff2axcodes(of_file)) == code[::-1]


@pytest.mark.parametrize("stored", CODES[::5])
@pytest.mark.parametrize("seen", CODES[::7])
def test_a_turn_moves_each_voxel_to_where_it_is_seen(stored, seen):
    turn = VolumeTurn.between(stored, seen)
    voxels = np.arange(4 * 5 * 6 * 2).reshape(4, 5, 6, 2)
    turned = turn.seen(voxels)
    assert turned.shape[:3] == turn.seen_size((4, 5, 6))
    assert (turn.stored(turned[..., 1]) == voxels[..., 1]).all()
    # the voxel at the end of a dim lies at the end that its letter names
    for number, letter in enumerate(seen):
        axis = next(ends for ends in ("LR", "PA", "IS") if letter in ends)
        dim = next(k for k, other in enumerate(stored) if other in axis)
        first = voxels.take(0 if stored[dim] != letter else -1, dim)
        assert set(first.ravel()) == set(turned.take(-1, number).ravel())
    box = tuple(n for size in turned.shape[:3] for n in (1, size - 1))
    box = (0, *box[1:])  # not the same from both ends
    spans = [slice(*box[k : k + 2]) for k in (0, 2, 4)]
    at = turn.stored_box(box, turned.shape[:3])
    under = voxels[tuple(slice(*at[k : k + 2]) for k in (0, 2, 4))]
    assert (turn.seen(under) == turned[tuple(spans)]).all()


def test_a_training_set_has_an_orientation_if_all_of_its_volumes_have_it():
    one, other = affine_with("SAR"), affine_with("SPL")
    alike = Geometry.of([sample(one, (2, 1, 1)), sample(one, (3, 1, 0.5))])
    assert alike == Geometry("SAR", ((2, 1, 0.5), (3, 1, 1)))
    assert Geometry.parsed(alike.described()) == alike
    assert Geometry.of([sample(one, None), sample(other, (1, 1, 1))]) == Geometry()
    assert Geometry.of([sample(None, (1, 1, 1))]) == Geometry(None, ((1, 1, 1), (1, 1, 1)))
    assert Geometry.of([]) == Geometry() == Geometry.parsed(Geometry().described())
    assert alike.turn(other) == VolumeTurn.between("SPL", "SAR")
    assert alike.turn(None) == Geometry().turn(one) == VolumeTurn()


def test_other_spacings_are_remarked():
    trained = Geometry(None, ((2.0, 1.0, 1.0), (2.0, 1.0, 1.0)))
    assert trained.remark((2.1, 1.0, 0.95)) == Geometry().remark(None) == ""
    said = trained.remark((5.0, 1.0, 1.0))
    assert "5 x 1 x 1 mm" in said
    assert "training set has 2 x 1 x 1 mm" in said
    assert "is unknown" in trained.remark(None)
    wide = Geometry(None, ((2.0, 1.0, 1.0), (4.0, 1.0, 1.0)))
    assert wide.remark((3.0, 1.0, 1.0)) == ""
    assert "2 x 1 x 1 to 4 x 1 x 1 mm" in wide.remark((9.0, 1.0, 1.0))


RANDOM = np.random.default_rng(0)
ALL = Augmentation("random", 0.5, True, 0.2, 0.3, 0.4, 0.1, 0.05, 2.0)
FLOATS = RANDOM.uniform(0.3, 0.7, (5, 6, 3))
LUMA = [0.299, 0.587, 0.114]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"flop": 0.5}, "data.augment.flop is unknown: there are crop, flip, rotate"),
        ({"crop": "corner"}, "data.augment.crop=corner is unknown: take centre or random"),
        ({"rotate": 90}, "data.augment.rotate=90 must be true or false"),
        ({"flip": 1.5}, "data.augment.flip=1.5 is out of range: use a number from 0 .* to 1$"),
        ({"hue": 0.51}, "data.augment.hue=0.51 is out of range: .* to 0.5$"),
        ({"stain": float("nan")}, "data.augment.stain=nan is out of range"),
        ({"saturation": None}, "data.augment.saturation=None is out of range"),
    ],
)
def test_settings_that_are_unknown_or_out_of_range_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        Augmentation.from_config(given)


def test_a_draw_follows_from_seed_epoch_and_sample():
    keys = list(itertools.product((0, 1), repeat=3))
    draws = [draw(ALL, *key) for key in keys]
    assert len(set(draws)) == len(keys)
    assert [draw(ALL, *key) for key in keys] == draws
    # no continuation of the stream with the same seed that orders the samples
    ours = draw(replace(ALL, flip=0.0), 3, 4, 0).crop
    for other in ([3, 4, 0], [3, 4]):
        assert ours != tuple(np.random.default_rng(other).random(2))
    # one setting leaves what is drawn for others
    without = draw(replace(ALL, hue=0, stain=0), 0, 0, 5)
    assert without == replace(draw(ALL, 0, 0, 5), hue=0.0, stain=None)


def test_draws_fill_their_ranges():
    draws = [draw(ALL, 0, epoch, sample) for epoch in range(10) for sample in range(100)]
    for values, low, high in [
        ([d.crop[0] for d in draws], 0, 1),
        ([d.brightness for d in draws], 0.8, 1.2),
        ([d.contrast for d in draws], 0.7, 1.3),
        ([d.saturation for d in draws], 0.6, 1.4),
        ([d.hue for d in draws], -0.1, 0.1),
        ([d.sigma for d in draws], 0, 2),
        *(([d.stain[0][channel] for d in draws], 0.95, 1.05) for channel in range(3)),
        *(([d.stain[1][channel] for d in draws], -0.05, 0.05) for channel in range(3)),
    ]:
        margin = 0.02 * (high - low)
        assert low <= min(values) < low + margin
        assert high >= max(values) > high - margin
        assert np.mean(values) == pytest.approx((low + high) / 2, abs=0.05 * (high - low))
    assert np.bincount([d.turns for d in draws]).tolist() == pytest.approx([250] * 4, abs=60)
    both = [2 * d.flip_rows + d.flip_cols for d in draws]
    assert np.bincount(both).tolist() == pytest.approx([250] * 4, abs=60)


def test_brightness_contrast_and_saturation():
    assert recolour(FLOATS, Draw(brightness=1.2)) == pytest.approx(1.2 * FLOATS)
    assert recolour(FLOATS, Draw(brightness=2.0)).max() == 1
    contrast = recolour(FLOATS[..., :1], Draw(contrast=1.3))
    assert contrast == pytest.approx(0.5 + 1.3 * (FLOATS[..., :1] - 0.5))
    luma = (FLOATS @ LUMA)[..., None]
    for saturation in (0.0, 1.4):
        found = recolour(FLOATS, Draw(saturation=saturation))
        assert found == pytest.approx(luma + saturation * (FLOATS - luma))


def test_hue_turns_colours_and_keeps_grey_and_luma():
    grey = np.full((2, 2, 3), 0.4)
    assert recolour(grey, Draw(hue=0.3)) == pytest.approx(grey, abs=2e-3)
    red = np.array([[[0.6, 0.4, 0.4]]])
    hues = sorted(
        colorsys.rgb_to_hsv(*recolour(red, Draw(hue=hue))[0, 0])[0] for hue in (-1 / 3, 1 / 3)
    )
    assert hues == pytest.approx([1 / 3, 2 / 3], abs=0.06)
    found = recolour(red, Draw(hue=1 / 3))[0, 0]
    assert found @ LUMA == pytest.approx(red[0, 0] @ LUMA, abs=2e-3)
    assert recolour(recolour(red, Draw(hue=0.2)), Draw(hue=-0.2)) == pytest.approx(red)


def test_stain_jitter_is_that_of_ruifrok_s_unmixing():
    factors, added = (1.04, 0.97, 1.02), (0.01, -0.02, 0.03)
    found = recolour(FLOATS, Draw(stain=(factors, added)))
    amounts = -np.log10(FLOATS) @ hed_from_rgb
    stains = np.linalg.inv(hed_from_rgb)
    lengths = np.linalg.norm(stains, axis=1)  # ours are of length 1
    expected = 10 ** -((amounts * factors + added / lengths) @ stains)
    assert found == pytest.approx(expected)
    # black stays finite, and white without added stain white
    drawn = Draw(stain=((1.2, 1.2, 1.2), (0.0, 0.0, 0.0)))
    assert (recolour(np.full((1, 1, 3), 255, np.uint8), drawn) == 255).all()
    black = recolour(np.zeros((1, 1, 3)), drawn)[0, 0]
    assert black == pytest.approx([10 ** (1.2 * math.log10(DARKEST))] * 3)


def test_a_pixel_does_not_depend_on_how_many_rows_are_taken_at_a_time(monkeypatch):
    drawn = Draw(hue=0.1, saturation=1.3, stain=((1.1, 0.9, 1.0), (0.02, 0.0, 0.0)))
    pixels = RANDOM.integers(0, 256, (37, 41, 3), np.uint8)
    colours, blurred = recolour(pixels, drawn), blur_of(pixels, 1.5)
    monkeypatch.setattr(pixel_changes, "_ROWS_BYTES", 1)
    assert (recolour(pixels, drawn) == colours).all()
    assert (recolour(pixels[::-1, 5:11], drawn) == colours[::-1, 5:11]).all()
    assert (blur_of(pixels, 1.5) == blurred).all()


def blur_of(pixels, sigma):
    size = pixels.shape[:2]
    return blur(pixels, (0, size[0], 0, size[1]), size, sigma)


@pytest.mark.parametrize("sigma", [0.3, 2.7])
def test_blur_is_scipy_s_gaussian_with_the_edge_going_on(sigma):
    pixels = RANDOM.random((17, 9, 2))
    expected = pixels
    for axis in (0, 1):
        expected = gaussian_filter1d(expected, sigma, axis, mode="nearest", radius=radius_of(sigma))
    assert blur_of(pixels, sigma) == pytest.approx(expected, abs=1e-12)


def test_of_blur_bytes_are_rounded_and_flat_images_stay():
    pixels = RANDOM.integers(0, 256, (15, 12, 3), np.uint8)
    found = blur_of(pixels, 1.5)
    assert found.dtype == np.uint8
    assert np.abs(found - blur_of(pixels / 255, 1.5) * 255).max() <= 0.51
    flat = np.full((6, 7, 1), 255, np.uint8)
    assert (blur_of(flat, 4.0) == flat).all()
    assert blur_of(pixels, 0.0) is pixels
    assert blur_of(pixels[:0], 1.0).shape == (0, 12, 3)
