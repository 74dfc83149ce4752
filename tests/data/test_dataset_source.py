"""A user's own data set: forms of samples, seeded generators, transforms, and boxes of samples."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from spatialdl.data.dataset_source import DatasetSource
from spatialdl.data.sample_forms import SampleForm
from spatialdl.data.sample_generators import own_generators, seeded
from spatialdl.data.sample_transforms import SampleTransforms, check_follows, convention_of
from tests.data import own_datasets as own
from tests.vision import need_timm

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
        ("classification", (zeros(20, 20, 3), 1), r"a tensor.*set data\.channel_dim=last"),
        ("classification", (np.zeros((3, 20, 20)), 1), r"an array.*set data\.channel_dim=first"),
        ("classification", (IMAGE, [0, 1]), r"target has shape \(2,\).*argmax of a one-hot"),
        ("classification", (IMAGE, 1.5), "target is .*1.5.*a whole number from 0"),
        ("classification", (IMAGE, "cat"), r"the target is a str \('cat'\)"),
        ("multilabel", (IMAGE, [0, 2]), "has the value 2, task=multilabel takes 1 .*0"),
        ("regression", (IMAGE, [math.inf]), "infinite values: mark unknown values with NaN"),
        ("regression", (IMAGE, np.ones((1, 1))), "takes a vector of numbers"),
        ("segmentation", (IMAGE, zeros(2, 3, 4)), "which is 2 channels.*argmax"),
        ("segmentation", (IMAGE, torch.full((3, 4), 0.5)), "non-integer values"),
        ("segmentation", (IMAGE, torch.full((3, 4), -1)), "values, down to -1: mark .* with 255"),
        ("segmentation", (IMAGE, zeros(4, 4)), r"mask has shape \(4, 4\), its image has 3 x"),
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


def test_generators_of_objects_are_found_wherever_they_lie():
    kept = SimpleNamespace(
        a=[np.random.default_rng(), (random.Random(),)],
        b={"c": partial(max, torch.Generator())},
        d=SimpleNamespace(legacy=np.random.RandomState()),
        monai=Monai(),
        files=["x"] * 10_000,
        module=np,
    )
    kept.itself = kept

    def numbers() -> list[float]:
        with seeded(own_generators(kept), 3, 1, 4):
            generator = kept.b["c"].args[0]
            return [
                *(kept.a[0].random(), kept.a[1][0].random(), kept.d.legacy.random()),
                *(kept.monai.inner.random(), float(torch.rand((), generator=generator))),
            ]

    first = numbers()
    assert len(set(first)) == 5
    assert numbers() == first
    assert len(own_generators(kept)) == 5


def test_a_box_is_that_of_the_whole_sample_in_any_order():
    source, other = (DatasetSource(own.Noise(), SampleForm(), seed=3) for _ in range(2))
    whole = {(e, n): other.read(n, epoch=e) for e in (0, 1) for n in (4, 2, 0)}
    for (epoch, number), pixels in reversed(whole.items()):
        assert np.array_equal(source.read(number, BOX, epoch=epoch), pixels[3:17, 2:11])
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
        image, mask = source.read(1, BOX, epoch=epoch), source.read_mask(1, BOX, epoch=epoch)
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


MASK = torch.tensor([[0, 1, 2, 3]] * 3)
SEGMENTATION = SampleForm("segmentation")


def doubled(image: Any) -> Any:
    return 2 * image


def mirrored(image: Any, mask: Any) -> tuple[Any, Any]:
    return image.flip(-1), mask.flip(-1)


class Albumentation:
    """As a transform of albumentations is called."""

    __module__ = "albumentations.core"

    def __call__(self, **parts: Any) -> dict[str, Any]:
        return {name: np.ascontiguousarray(part[:, ::-1]) for name, part in parts.items()}


def test_each_is_called_as_its_library_does():
    both = SampleTransforms([doubled, mirrored], SEGMENTATION)((IMAGE, MASK))
    assert torch.equal(both[0], 2 * IMAGE.flip(-1))
    assert torch.equal(both[1], MASK.flip(-1))
    label = SampleTransforms([Albumentation()], SampleForm())((IMAGE.numpy(), 3))
    assert label[1] == 3
    sample = {"img": IMAGE, "label": MASK, "path": "a.png"}  # keeps what is not asked for
    found = SampleTransforms([doubled, mirrored], SEGMENTATION)(sample)
    assert torch.equal(found["img"], both[0])
    assert torch.equal(found["label"], both[1])
    assert found["path"] == "a.png"
    assert convention_of(np.negative) == "image"  # a function of C


def test_transforms_of_monai():
    monai = pytest.importorskip("monai.transforms")
    flip = monai.RandFlipd(["image", "label"], prob=1.0, spatial_axis=1)
    assert convention_of(monai.Compose([flip])) == convention_of(flip) == "dict"
    assert convention_of(monai.Compose([monai.RandFlip()])) == "image"
    transforms = SampleTransforms([flip, monai.ScaleIntensity()], SEGMENTATION)
    found = transforms((IMAGE, MASK[None]))
    assert list(found) == ["image", "label"]
    pixels, mask = SEGMENTATION.decoded(found)
    assert np.allclose(pixels, IMAGE.flip(-1).permute(1, 2, 0) / 23)
    assert np.array_equal(mask, MASK.flip(-1))
    turn = monai.RandFlip(prob=1.0)
    said = r"RandFlip of transform 1 .* use monai.transforms.RandFlipd with keys: \[image, label\]"
    for transform in (turn, monai.Compose([monai.ScaleIntensity(), turn])):
        with pytest.raises(ValueError, match=said):
            check_follows([monai.ScaleIntensity(), transform])
    check_follows([monai.ScaleIntensity(), monai.RandFlipd(["image", "label"])])
    SampleTransforms([turn], SampleForm())  # without masks nothing is lost


def test_transforms_of_torchvision_move_masks_along():
    need_timm()
    from torchvision import transforms
    from torchvision.transforms import v2

    crop = v2.RandomCrop(2)
    assert (convention_of(crop), convention_of(transforms.RandomCrop(2))) == ("pair", "image")
    image, mask = SampleTransforms([crop], SEGMENTATION)((MASK.float()[None], MASK))
    assert image.shape == (1, 2, 2)
    assert torch.equal(image[0].long(), mask)
    picture = own.Pictures()[0]
    changed = SampleTransforms([v2.RandomHorizontalFlip(1.0), v2.ToImage()], SampleForm())(picture)
    assert np.array_equal(SampleForm().pixels(changed[0]), np.asarray(picture[0])[:, ::-1])
    flip = transforms.RandomHorizontalFlip()
    for transform in (
        *(flip, transforms.Compose([transforms.ToTensor(), flip])),
        *(transforms.RandomApply([flip]), nn.Sequential(flip)),
    ):
        with pytest.raises(
            ValueError, match=r"RandomHorizontalFlip .* use torchvision\..*\.v2\.Ra"
        ):
            SampleTransforms([transform], SEGMENTATION)
    SampleTransforms([transforms.ColorJitter(0.1), v2.RandomHorizontalFlip()], SEGMENTATION)


class Striped(Dataset):
    """Images and masks whose pixels encode their position."""

    classes = ("a", "b", "c", "d")

    def __init__(self, kind: str, task: str = "segmentation") -> None:
        self.kind, self.task = kind, task

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        mask = np.random.default_rng(number).integers(0, 4, (20, 20))
        pixels = np.repeat(np.uint8(60 * mask)[..., None], 3, 2)
        target = mask if self.task == "segmentation" else number % 4
        if self.kind == "array":
            return pixels, target
        return torch.from_numpy(pixels).permute(2, 0, 1) / 240, target


def check_epochs(dataset: Striped, make: Callable[[], list[Any]], *, follows: bool = True) -> None:
    """Samples follow from (seed, epoch, sample) in any order, masks follow images."""
    form = SampleForm(dataset.task)
    first, second = (DatasetSource(dataset, form, seed=1, transforms=make()) for _ in range(2))
    where = [(epoch, n) for epoch in (0, 3) for n in range(4)]
    before = {at: first.read(at[1], epoch=at[0]) for at in where}
    for (epoch, n), pixels in reversed(before.items()):
        assert np.array_equal(second.read(n, epoch=epoch), pixels)
        if follows and dataset.task == "segmentation":
            mask = second.read_mask(n, epoch=epoch)
            white = 240 if pixels.dtype == np.uint8 else 1
            assert np.array_equal(np.rint(pixels[..., 0] * (4 / white)), mask)
    assert sum(not np.array_equal(before[0, n], before[3, n]) for n in range(4)) > 1


def test_transforms_of_albumentations():
    albumentations = pytest.importorskip("albumentations")

    def moving() -> list[Any]:
        turn = albumentations.OneOf([albumentations.RandomRotate90(), albumentations.Transpose()])
        flip = albumentations.HorizontalFlip()
        return [albumentations.Compose([albumentations.RandomCrop(13, 9), turn]), flip]

    def changing() -> list[Any]:
        return [albumentations.GaussNoise(p=1), albumentations.ElasticTransform(p=1)]

    for task in ("segmentation", "classification"):
        check_epochs(Striped("array", task), moving)
    check_epochs(Striped("array"), changing, follows=False)


def test_transforms_of_kornia_move_masks_along_with_or_without_keepdim():
    kornia = pytest.importorskip("kornia.augmentation")

    def moving() -> list[Any]:
        crop = kornia.RandomCrop((13, 9))
        both = kornia.AugmentationSequential(kornia.RandomVerticalFlip(), crop)
        return [kornia.RandomHorizontalFlip(), kornia.RandomVerticalFlip(keepdim=True), both]

    def changing() -> list[Any]:
        inner = kornia.ImageSequential(kornia.ColorJiggle(0.1, 0.1, 0.1, 0.1, p=1.0))
        return [inner, kornia.RandomAffine(30.0, p=1.0), kornia.RandomGaussianNoise(p=1.0)]

    for task in ("segmentation", "classification"):
        check_epochs(Striped("tensor", task), moving)
    check_epochs(Striped("tensor"), changing, follows=False)
    rotation = SampleTransforms([kornia.RandomRotation(30.0, p=1.0)], SEGMENTATION)
    _, mask = SEGMENTATION.decoded(rotation(Striped("tensor")[0]))
    assert set(np.unique(mask)) <= {0, 1, 2, 3}, "classes are not mixed"
    with pytest.raises(ValueError, match=r"takes float tensors .* is a ndarray of"):
        SampleTransforms([kornia.RandomVerticalFlip()], SEGMENTATION)(Striped("array")[0])
    inner = nn.Sequential(nn.Identity(), kornia.RandomHorizontalFlip())
    with pytest.raises(ValueError, match=r"list the transforms of kornia in data.transforms them"):
        SampleTransforms([inner], SEGMENTATION)


class Batched(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]


def alone(image: Any, mask: Any) -> Any:
    return image


@pytest.mark.parametrize(
    ("transform", "sentence"),
    [
        (Batched(), r"shape \(1, 2, 3, 4\) for one of \(2, 3, 4\): samples have no batch dim"),
        (alone, "called with image and target, and returned a Tensor"),
        (Albumentation(), "albumentations takes arrays"),
    ],
)
def test_what_a_transform_cannot_be_is_refused_and_named(transform, sentence):
    with pytest.raises(ValueError, match=sentence) as found:
        SampleTransforms([doubled, transform], SEGMENTATION)((IMAGE, MASK))
    assert "(transform 1 of data.transforms" in found.value.__notes__[0]
    check_follows([doubled, nn.Identity(), torch.relu])  # a user's own are not looked at
