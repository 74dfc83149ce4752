"""Transforms of images that move pixels, which a mask would not follow.

Array transforms of MONAI and those of torchvision before v2 are given the image alone. With masks,
those that flip, turn, crop or warp would train on labels of other pixels, and nothing would fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

_TORCHVISION = {
    *("RandomHorizontalFlip", "RandomVerticalFlip", "RandomRotation", "RandomAffine"),
    *("RandomPerspective", "RandomCrop", "RandomResizedCrop", "CenterCrop", "Resize", "Pad"),
    *("ElasticTransform", "RandAugment", "AutoAugment", "TrivialAugmentWide", "AugMix"),
    *("FiveCrop", "TenCrop"),
}
_MONAI = ("monai.transforms.spatial.", "monai.transforms.croppad.")
_MOST = 256
"""Transforms inside of each other that are looked into."""


def check_follows(transforms: Sequence[Any]) -> None:
    """Refuse transforms of images alone that move pixels.

    Args:
        transforms: that are called with images of samples that have masks.

    Raises:
        ValueError: naming the transform and what to take instead.
    """
    for number, transform in enumerate(transforms):
        for one in _inside(transform):
            remedy = _remedy(one)
            if remedy is not None:
                raise ValueError(
                    f"data.transforms: {type(one).__name__} of transform {number} moves pixels of "
                    f"the image, and the mask would not follow: {remedy}"
                )


def _remedy(one: Any) -> str | None:
    name, module = type(one).__name__, type(one).__module__
    if module.startswith("torchvision.transforms") and ".v2" not in module:
        return f"take torchvision.transforms.v2.{name}" if name in _TORCHVISION else None
    if module.startswith(_MONAI) and not hasattr(one, "keys"):
        return f"take monai.transforms.{name}d with keys: [image, label]"
    if module.startswith("kornia."):
        return "let data.transforms name the transforms of kornia themselves"
    return None


def _inside(transform: Any) -> Iterator[Any]:
    """A transform, and those that it calls."""
    waiting, seen = [transform], 0
    while waiting and seen < _MOST:
        one, seen = waiting.pop(0), seen + 1
        yield one
        inner = getattr(one, "transforms", None)
        waiting += inner if isinstance(inner, list | tuple) else []
        single = getattr(one, "transform", None)
        waiting += [single] if callable(single) and not isinstance(single, type) else []
        waiting += one.children() if isinstance(one, nn.Module) else []
