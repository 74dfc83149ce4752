from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spatialdl.data.dataset_source import DatasetSource
from spatialdl.data.sample_forms import SampleForm
from spatialdl.data.sample_transforms import SampleTransforms, convention_of
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


def test_a_dict_keeps_what_is_not_asked_for():
    sample = {"img": IMAGE, "label": MASK, "path": "a.png"}
    found = SampleTransforms([doubled, mirrored], SEGMENTATION)(sample)
    assert torch.equal(found["img"], 2 * IMAGE.flip(-1))
    assert torch.equal(found["label"], MASK.flip(-1))
    assert found["path"] == "a.png"


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


class Batched(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]


def alone(image: Any, mask: Any) -> Any:
    return image


@pytest.mark.parametrize(
    ("transform", "sentence"),
    [
        (Batched(), r"shape \(1, 2, 3, 4\) for one of \(2, 3, 4\): samples have no batch dim"),
        (alone, "called with image and target, and gave a Tensor"),
        (Albumentation(), "albumentations takes arrays"),
    ],
)
def test_what_a_transform_cannot_be_is_refused_and_named(transform, sentence):
    with pytest.raises(ValueError, match=sentence) as found:
        SampleTransforms([doubled, transform], SEGMENTATION)((IMAGE, MASK))
    assert "(transform 1 of data.transforms" in found.value.__notes__[0]


class Noisy:
    """It has a generator of its own, and draws from a common one."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng()

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image + self.draws.random() + torch.rand(())


def test_their_random_numbers_follow_from_seed_epoch_and_sample():
    first, second = (
        DatasetSource(own.Noise(), SampleForm(), seed=1, transforms=[Noisy()]) for _ in range(2)
    )
    before = {(epoch, n): first.at(epoch).read(n) for epoch in (0, 1) for n in (0, 1)}
    for (epoch, n), pixels in reversed(before.items()):
        assert np.array_equal(second.at(epoch).read(n), pixels)
    assert not np.array_equal(before[0, 0], before[1, 0])


def test_a_function_of_c_is_called_with_the_image():
    assert convention_of(np.negative) == "image"
