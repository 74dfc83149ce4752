"""Check for image transforms that move pixels without moving the mask.

Array transforms of MONAI and those of torchvision before v2 are called with the image only. With
masks, those that flip, rotate, crop or warp would train on labels of other pixels without an error.
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
"""Number of nested transforms that are searched."""


def check_follows(transforms: Sequence[Any]) -> None:
    """Reject transforms of images alone that move pixels.

    Args:
        transforms: transforms of images whose samples have masks.

    Raises:
        ValueError: with the transform and its replacement.
    """
    for number, transform in enumerate(transforms):
        for part in _inside(transform):
            remedy = _remedy(part)
            if remedy is not None:
                raise ValueError(
                    f"data.transforms: {type(part).__name__} of transform {number} moves pixels of "
                    f"the image, but not of the mask: {remedy}"
                )


def _remedy(part: Any) -> str | None:
    name, module = type(part).__name__, type(part).__module__
    if module.startswith("torchvision.transforms") and ".v2" not in module:
        return f"use torchvision.transforms.v2.{name}" if name in _TORCHVISION else None
    if module.startswith(_MONAI) and not hasattr(part, "keys"):
        return f"use monai.transforms.{name}d with keys: [image, label]"
    if module.startswith("kornia."):
        return "list the transforms of kornia in data.transforms themselves"
    return None


def _inside(transform: Any) -> Iterator[Any]:
    """A transform and its nested transforms."""
    waiting, seen = [transform], 0
    while waiting and seen < _MOST:
        part, seen = waiting.pop(0), seen + 1
        yield part
        inner = getattr(part, "transforms", None)
        waiting += inner if isinstance(inner, list | tuple) else []
        single = getattr(part, "transform", None)
        waiting += [single] if callable(single) and not isinstance(single, type) else []
        waiting += part.children() if isinstance(part, nn.Module) else []
