"""Transforms that a mask would not follow are refused before training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spatialdl.data.sample_forms import SampleForm
from spatialdl.data.sample_transforms import SampleTransforms
from spatialdl.data.unpaired_transforms import check_follows
from tests.vision import need_timm

SEGMENTATION = SampleForm("segmentation")


def test_array_transforms_of_monai_that_move_pixels_are_refused():
    monai = pytest.importorskip("monai.transforms")
    flip = monai.RandFlip(prob=1.0)
    said = r"RandFlip of transform 1 .* use monai.transforms.RandFlipd with keys: \[image, label\]"
    for transform in (flip, monai.Compose([monai.ScaleIntensity(), flip])):
        with pytest.raises(ValueError, match=said):
            check_follows([monai.ScaleIntensity(), transform])
    check_follows([monai.ScaleIntensity(), monai.RandFlipd(["image", "label"])])
    SampleTransforms([flip], SampleForm())  # without masks nothing is lost


def test_first_transforms_of_torchvision_that_move_pixels_are_refused():
    need_timm()
    from torchvision import transforms
    from torchvision.transforms import v2

    flip = transforms.RandomHorizontalFlip()
    said = "RandomHorizontalFlip .* use torchvision.transforms.v2.RandomHorizontalFlip"
    for transform in (
        flip,
        transforms.Compose([transforms.ToTensor(), flip]),
        transforms.RandomApply([flip]),
        nn.Sequential(flip),
    ):
        with pytest.raises(ValueError, match=said):
            SampleTransforms([transform], SEGMENTATION)
    SampleTransforms([transforms.ColorJitter(0.1), v2.RandomHorizontalFlip()], SEGMENTATION)


def test_kornia_inside_of_other_modules_is_refused():
    kornia = pytest.importorskip("kornia.augmentation")
    inner = nn.Sequential(nn.Identity(), kornia.RandomHorizontalFlip())
    with pytest.raises(
        ValueError, match=r"list the transforms of kornia in data.transforms themselves"
    ):
        SampleTransforms([inner], SEGMENTATION)
    SampleTransforms([kornia.RandomHorizontalFlip()], SEGMENTATION)


def test_transforms_of_a_users_own_are_not_looked_at():
    def brighter(image: torch.Tensor) -> torch.Tensor:
        return image + 1

    check_follows([brighter, nn.Identity(), torch.relu])
