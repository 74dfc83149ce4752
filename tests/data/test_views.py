"""Views of images and volumes: cropped, padded and changed, of any box the same."""

from __future__ import annotations

from itertools import permutations, product

import nibabel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.data.augmentation.drawing import draw
from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.data.format import UNLABELLED
from spatialdl.data.samples import VolumeSample
from spatialdl.data.views import Views
from spatialdl.data.volume_geometry import Geometry, VolumeTurn, orientation_of


class Images:
    """One image and its mask for each sample; no box may reach beyond, or be empty."""

    has_masks = True
    classes = ("a", "b")

    def __init__(self, sizes, dtype="uint8", channels=3):
        random = np.random.default_rng(0)
        white = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else 1
        self.images = [(random.random((*size, channels)) * white).astype(dtype) for size in sizes]
        self.masks = [random.integers(0, 2, size).astype(np.uint8) for size in sizes]
        self.labels = np.zeros(len(sizes), np.int64)
        self.channels = channels
        self.asked: list[tuple[int, int, int, int]] = []

    def __len__(self):
        return len(self.images)

    def image_size(self, sample):
        return self.images[sample].shape[:2]

    def read(self, sample, box=None):
        return self._cut(self.images[sample], box)

    def read_mask(self, sample, box=None):
        return self._cut(self.masks[sample], box)

    def _cut(self, image, box):
        row0, row1, col0, col1 = box
        assert 0 <= row0 < row1 <= image.shape[0]
        assert 0 <= col0 < col1 <= image.shape[1]
        self.asked.append(box)
        return image[row0:row1, col0:col1]


def whole(views, epoch=0, sample=0, mask=False):
    box = tuple(at for n in views.size for at in (0, n))
    return (views.read_mask if mask else views.read)(epoch, sample, box)


@st.composite
def boxes(draw, size):
    row = sorted(draw(st.tuples(*[st.integers(0, size[0])] * 2)))
    col = sorted(draw(st.tuples(*[st.integers(0, size[1])] * 2)))
    return (*row, *col)


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


@given(st.data(), st.tuples(side, side), st.tuples(side, side), settings)
def test_a_box_is_that_of_the_whole_view(data, stored, size, augmentation):
    dtype = data.draw(st.sampled_from(["uint8", "uint16", "float32"]))
    views = Views(Images([stored], dtype), size, None, augmentation, data.draw(st.integers(0, 9)))
    epoch, box = data.draw(st.integers(0, 3)), data.draw(boxes(size))
    cut = np.s_[box[0] : box[1], box[2] : box[3]]
    found, mask = views.read(epoch, 0, box), views.read_mask(epoch, 0, box)
    assert found.dtype == dtype
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, whole(views, epoch)[cut], strict=True)
    np.testing.assert_array_equal(mask, whole(views, epoch, mask=True)[cut], strict=True)


def test_without_augmentation_the_own_size_is_the_image_itself_and_no_more_is_read():
    images = Images([(7, 9)])
    views = Views(images, (7, 9))
    assert (whole(views) == images.images[0]).all()
    assert (whole(views, mask=True) == images.masks[0]).all()
    assert (views.read(5, 0, (2, 4, 1, 9)) == images.images[0][2:4, 1:9]).all()
    assert images.asked[-1] == (2, 4, 1, 9)
    for box in ((0, 8, 0, 9), (-1, 3, 0, 8), (5, 4, 0, 8)):
        with pytest.raises(ValueError, match="is not inside a view of 7 x 9"):
            views.read(0, 0, box)
    images = Images([(40, 50)])
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


@pytest.mark.parametrize(("dtype", "white"), [("uint8", 255), ("uint16", 65535), ("float32", 1)])
def test_small_images_lie_in_the_middle_of_the_background(dtype, white):
    images = Images([(3, 12), (9, 2)], dtype)
    views = Views(images, (7, 6))
    found = whole(views)
    assert (found[2:5] == images.images[0][:, 3:9]).all()
    assert (found[:2] == white).all()
    assert (found[5:] == white).all()
    assert (whole(views, sample=1)[:, 2:4] == images.images[1][1:8]).all()
    mask = whole(views, mask=True)
    assert (mask[2:5] == images.masks[0][:, 3:9]).all()
    assert (mask[[0, 1, 5, 6]] == UNLABELLED).all()


def test_a_background_of_ones_own():
    images = Images([(2, 2)])
    assert (whole(Views(images, (4, 4), 7))[0] == 7).all()
    for wrong in (256, -1, 0.5):
        with pytest.raises(
            ValueError, match=r"data.background=.* is not a value of uint8.*0 to 255"
        ):
            whole(Views(images, (4, 4), wrong))
    assert (whole(Views(Images([(2, 2)], "float32"), (4, 4), 0.5))[0] == 0.5).all()


@pytest.mark.parametrize(("dtype", "white"), [("uint16", 4095), ("float32", 0.25), ("float64", 9)])
def test_the_scale_of_pixels_is_white(dtype, white):
    dark = Images([(3, 3)], dtype)
    dark.images[0] = (dark.images[0].astype(np.float64) / dark.images[0].max() * white).astype(
        dtype
    )
    padded = whole(Views(dark, (7, 6), white=white))
    assert (padded[:2] == white).all()
    with pytest.raises(ValueError, match=f"not a value of {dtype} images: use 0 to {white:g}, or"):
        whole(Views(dark, (7, 6), white + 1, white=white))
    # colours change as they do in images whose white is that of their type
    how = Augmentation(brightness=0.5, contrast=0.5, saturation=0.5, stain=0.1, blur=1.0)
    light = Images([(3, 3)], "float64")
    light.images[0] = dark.images[0].astype(np.float64) / white
    for seed in range(5):
        found = whole(Views(dark, (7, 6), augmentation=how, seed=seed, white=white)) / white
        expected = whole(Views(light, (7, 6), augmentation=how, seed=seed))
        assert np.abs(found - expected).max() < (2 / white if dtype == "uint16" else 1e-5)


def test_masks_move_with_their_images():
    """Image and mask still match after all changes of geometry."""
    images = Images([(21, 34)])
    images.images[0][..., 0] = 100 + 50 * images.masks[0]
    views = Views(images, (30, 25), augmentation=Augmentation("random", 0.5, True))
    seen = set()
    for epoch in range(30):
        image, mask = whole(views, epoch), whole(views, epoch, mask=True)
        inside = mask != UNLABELLED
        assert 0 < inside.sum() < inside.size
        assert (image[..., 0][inside] == 100 + 50 * mask[inside]).all()
        assert (image[~inside] == 255).all()
        seen.add(mask.tobytes())
    assert len(seen) >= 8


class Volumes(Images):
    """The same of volumes."""

    def image_size(self, sample):
        return self.images[sample].shape[:3]

    def _cut(self, image, box):
        cuts = list(zip(box[::2], box[1::2], strict=True))
        assert all(0 <= a < b <= n for (a, b), n in zip(cuts, image.shape, strict=False))
        return image[tuple(slice(*cut) for cut in cuts)]


@pytest.mark.parametrize("size", [(5, 6, 6), (9, 4, 4), (4, 11, 11), (3, 5, 8)])
def test_boxes_of_changed_volumes_are_those_of_the_whole_view(size):
    """Against NumPy: crop or pad, mirror along all dims, turn in the plane of the slices."""
    source = Volumes([(7, 8, 9)], dtype="int16", channels=2)
    square = size[1] == size[2]
    views = Views(source, size, -7, Augmentation("random", 0.5, square), seed=3)
    padded = np.pad(source.images[0], ((20, 20),) * 3 + ((0, 0),), constant_values=-7)
    random, seen = np.random.default_rng(0), set()
    for epoch in range(24):
        drawn = draw(views.augmentation, 3, epoch, 0)
        begins = [
            20 + (int(part * (n - wanted + 1)) if n > wanted else (n - wanted) // 2)
            for part, n, wanted in zip(drawn.crop, (7, 8, 9), size, strict=True)
        ]
        cropped = padded[tuple(slice(b, b + n) for b, n in zip(begins, size, strict=True))]
        mirrors = (drawn.flip_slices, drawn.flip_rows, drawn.flip_cols)
        seen.add((*mirrors, drawn.turns))
        mirrored = np.flip(cropped, [dim for dim, flip in enumerate(mirrors) if flip])
        expected = np.rot90(mirrored, drawn.turns, axes=(1, 2))
        assert whole(views, epoch).dtype == np.int16
        assert (whole(views, epoch) == expected).all()
        cuts = [sorted(random.integers(0, n + 1, 2).tolist()) for n in size]
        box = tuple(at for cut in cuts for at in cut)
        part = tuple(slice(*cut) for cut in cuts)
        assert (views.read(epoch, 0, box) == expected[part]).all()
        mask = whole(views, epoch, mask=True)
        assert (views.read_mask(epoch, 0, box) == mask[part]).all()
        assert ((mask == UNLABELLED) <= (expected == -7).all(-1)).all()
        stored = views.stored_box(epoch, 0, box)
        assert all(
            a >= 0 and b <= n for a, b, n in zip(stored[::2], stored[1::2], (7, 8, 9), strict=True)
        )
    assert len(seen) > (12 if square else 6)


def test_signals_are_cropped_padded_and_flipped():
    signal = np.arange(1, 8, dtype=np.uint8)[:, None]

    class Signals(Images):
        def __init__(self):
            super().__init__([(7, 1)], channels=1)

        def image_size(self, sample):
            return (7,)

        def read(self, sample, box=None):
            return signal[slice(*box)]

    assert Views(Signals(), (9,)).read(0, 0, (0, 9)).ravel().tolist() == [0, *range(1, 8), 0]
    assert Views(Signals(), (3,)).read(0, 0, (1, 3)).ravel().tolist() == [4, 5]
    flipped = Views(Signals(), (7,), augmentation=Augmentation(flip=1.0))
    assert flipped.read(0, 0, (0, 7)).ravel().tolist() == [7, 6, 5, 4, 3, 2, 1]
    assert flipped.stored_box(0, 0, (0, 2)) == (5, 7)
    with pytest.raises(ValueError, match=r"augment\.rotate requires images, these are signals"):
        Views(Signals(), (7,), augmentation=Augmentation(rotate=True))


def test_changes_of_colour_are_refused_by_name_where_there_are_none():
    for name in ("brightness", "contrast", "saturation", "hue", "stain", "blur"):
        how = Augmentation(**{name: 0.1})
        with pytest.raises(ValueError, match=rf"augment\.{name} change colours .* are volumes"):
            Views(Volumes([(3, 4, 5)]), (3, 4, 5), augmentation=how)
        with pytest.raises(ValueError, match=rf"augment\.{name} change .* images of int16"):
            Views(Images([(4, 5)], "int16"), (4, 5), augmentation=how)
    with pytest.raises(ValueError, match=r"data.augment.hue require images of 3 channels"):
        Views(Images([(5, 5)], channels=1), (5, 5), augmentation=Augmentation(hue=0.1))


def test_volumes_are_padded_with_zeros_and_integers_with_negative_ones_too():
    source = Volumes([(1, 1, 1)], dtype="int16", channels=1)
    assert Views(source, (3, 3, 3)).read(0, 0, (0, 1, 0, 1, 0, 1)).item() == 0
    assert Views(source, (3, 3, 3), -1024).read(0, 0, (0, 1, 0, 1, 0, 1)).item() == -1024
    with pytest.raises(ValueError, match=r"data\.background=-40000 .* use -32768 to 32767"):
        Views(source, (3, 3, 3), -40000).check_background()


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


def test_what_no_checkpoint_of_ours_says_is_refused():
    for row in (
        *({"orientation": wrong, "spacing": None} for wrong in ("RAX", "RLS", 3)),
        {"orientation": None, "spacing": [[1, 1, 1]]},
        {"orientation": None, "spacing": [[1, 1, 1], [1, 1, 0]]},
        {"spacing": None},
    ):
        with pytest.raises((ValueError, KeyError)):
            Geometry.parsed(row)


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
