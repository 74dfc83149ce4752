"""Transforms of samples: called as their libraries do, seeded, masks moved along with images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from spatialdl.data.dataset_source import DatasetSource
from spatialdl.data.sample_forms import SampleForm
from spatialdl.data.sample_transforms import SampleTransforms, convention_of
from spatialdl.data.unpaired_transforms import check_follows
from tests.data import own_datasets as own
from tests.vision import need_timm

IMAGE = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
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
    array = IMAGE.permute(1, 2, 0).numpy(), MASK.numpy()
    found = SampleTransforms([Albumentation()], SEGMENTATION)(array)
    assert np.array_equal(found[0], array[0][:, ::-1])
    assert np.array_equal(found[1], array[1][:, ::-1])
    label = SampleTransforms([Albumentation()], SampleForm())((array[0], 3))
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
    where = [(epoch, n) for epoch in (0, 3) for n in range(6)]
    before = {at: first.at(at[0]).read(at[1]) for at in where}
    for (epoch, n), pixels in reversed(before.items()):
        assert np.array_equal(second.at(epoch).read(n), pixels)
        if follows and dataset.task == "segmentation":
            mask = second.at(epoch).read_mask(n)
            white = 240 if pixels.dtype == np.uint8 else 1
            assert np.array_equal(np.rint(pixels[..., 0] * (4 / white)), mask)
    assert sum(not np.array_equal(before[0, n], before[3, n]) for n in range(6)) > 1


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
        check_epochs(Striped("array", task), changing, follows=False)


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
        check_epochs(Striped("tensor", task), changing, follows=False)
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
