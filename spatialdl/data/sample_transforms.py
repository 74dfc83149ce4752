"""Transforms of whole samples, called by the convention of their library.

=====================================  =============================================
dictionary transforms of MONAI         `transform({"image": image, "label": target})`
albumentations                         `transform(image=image, mask=mask)`
kornia.augmentation                    `transform(images)` of one image, masks as a second input
torchvision.transforms.v2, and those   `transform(image, target)`, which returns both
that take two arguments
any other                              `transform(image)`
=====================================  =============================================

A dict sample keeps its keys; the values of other keys are unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from spatialdl.data.sample_forms import SampleForm, shown

Convention = Literal["dict", "keywords", "batch", "pair", "image"]

_MOST = 8
"""Nesting depth to which composed transforms are searched."""


@dataclass(frozen=True)
class SampleTransforms:
    """A chain of transforms, called with a sample.

    Attributes:
        transforms: applied in this order.
        form: form of the samples.

    Raises:
        ValueError: samples have masks, and a transform moves pixels of the image only.
    """

    transforms: Sequence[Callable[..., Any]]
    form: SampleForm

    def __post_init__(self) -> None:
        if self.form.task == "segmentation":
            check_follows([one for one in self.transforms if convention_of(one) == "image"])

    def __call__(self, sample: Any) -> Any:
        """The transformed sample.

        Raises:
            ValueError: the form of the sample, or of a transform's result, is unknown.
            Exception: any error of a transform, with a note that names it.
        """
        for number, transform in enumerate(self.transforms):
            try:
                sample = self._changed(sample, transform)
            except Exception as error:
                name = type(transform).__name__
                error.add_note(f"(transform {number} of data.transforms, {name})")
                raise
        return sample

    def _changed(self, sample: Any, transform: Callable[..., Any]) -> Any:
        convention = convention_of(transform)
        given = sample[0] if _is_crop(sample) else sample
        image, target = self.form.parts(given)
        keys = self.form.names(given) if isinstance(given, Mapping) else None
        if convention == "dict":
            whole = given if keys is not None else {"image": image, "label": target}
            return transform(dict(whole))
        if convention == "keywords":
            image, target = self._by_keywords(transform, image, target)
        elif convention == "batch":
            image, target = self._as_batch(transform, image, target)
        elif convention == "pair":
            image, target = _two(transform(*self._wrapped(transform, image, target)))
        else:
            image = _same_dims(image, transform(image))
        if keys is None:
            return image, target
        return {**given, keys[0]: image, keys[1]: target}

    def _by_keywords(self, transform: Any, image: Any, target: Any) -> tuple[Any, Any]:
        if isinstance(image, torch.Tensor):
            raise ValueError(
                "albumentations takes arrays (rows, columns, channels), but the image is a "
                "tensor: remove the conversion to a tensor, and put ToTensorV2 at the end"
            )
        if self.form.task != "segmentation":
            return transform(image=np.asarray(image))["image"], target
        found = transform(image=np.asarray(image), mask=np.asarray(target))
        return found["image"], found["mask"]

    def _as_batch(self, transform: Any, image: Any, target: Any) -> tuple[Any, Any]:
        """Call kornia, which takes batches of floats, with the mask marked as a mask."""
        from kornia.augmentation import AugmentationSequential  # type: ignore[import-not-found,unused-ignore]

        if not isinstance(image, torch.Tensor) or not image.is_floating_point():
            raise ValueError(
                "kornia takes float tensors (channels, rows, columns), but the image is "
                f"{_typed(image)}: convert it, with values from 0 to 1"
            )
        if self.form.task != "segmentation":
            return _only(transform(image[None])), target
        mask = target if isinstance(target, torch.Tensor) else torch.from_numpy(np.array(target))
        keys = ["input", "mask"]
        if not isinstance(transform, AugmentationSequential):
            transform = AugmentationSequential(transform, data_keys=keys)
        has_channels = mask.ndim == image.ndim
        images = image[None], (mask if has_channels else mask[None])[None].to(image.dtype)
        image, mask = map(_only, _two(transform(*images, data_keys=keys)))
        return image, mask if has_channels else mask[0]

    def _wrapped(self, transform: Any, image: Any, target: Any) -> tuple[Any, Any]:
        """Wrap masks for torchvision, which transforms them with images only if marked."""
        if self.form.task != "segmentation" or not _is_from(transform, "torchvision"):
            return image, target
        from torchvision import tv_tensors  # type: ignore[import-untyped,import-not-found,unused-ignore]

        mask = target if isinstance(target, torch.Tensor) else torch.from_numpy(np.array(target))
        if isinstance(image, torch.Tensor):
            image = tv_tensors.Image(image)
        return image, tv_tensors.Mask(mask)


def convention_of(transform: Any) -> Convention:
    """The calling convention of a transform, see the module."""
    if _is_from(transform, "albumentations"):
        return "keywords"
    if _is_from(transform, "kornia"):
        return "batch"
    if _is_from(transform, "monai"):
        return "dict" if _has_keys(transform) else "image"
    if _is_from(transform, "torchvision.transforms.v2"):
        return "pair"
    called = transform.forward if isinstance(transform, nn.Module) else transform
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature
        return "image"
    needed = [
        one
        for one in parameters
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    return "pair" if len(needed) == 2 else "image"


def _has_keys(transform: Any) -> bool:
    """Whether a MONAI transform takes dicts; a composition is classified by its first one."""
    for _ in range(_MOST):
        if hasattr(transform, "keys"):
            return True
        inner = getattr(transform, "transforms", None)
        if not isinstance(inner, list | tuple) or not inner:
            return False
        transform = inner[0]
    return False


def _is_from(transform: Any, package: str) -> bool:
    kinds = type(transform).__mro__
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in kinds)


def _is_crop(sample: Any) -> bool:
    """Whether a sample is a list of one dict, as MONAI's random crops return."""
    return isinstance(sample, list) and len(sample) == 1 and isinstance(sample[0], Mapping)


def _two(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(f"it was called with image and target, and returned {shown(result)}")
    return result[0], result[1]


def _same_dims(before: Any, after: Any) -> Any:
    both = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    if both and before.ndim != after.ndim:
        raise ValueError(
            f"it returns a tensor of shape {tuple(after.shape)} for one of {tuple(before.shape)}: "
            "samples have no batch dim"
        )
    return after


def _only(batch: Any) -> Any:
    """The only image of a batch of one."""
    if not isinstance(batch, torch.Tensor) or len(batch) != 1:
        raise ValueError(f"it was called with a batch of one image, and returned {shown(batch)}")
    return batch[0]


def _typed(image: Any) -> str:
    kind = f" of {str(image.dtype).removeprefix('torch.')}" if hasattr(image, "dtype") else ""
    return shown(image) + kind


_TORCHVISION = {
    *("RandomHorizontalFlip", "RandomVerticalFlip", "RandomRotation", "RandomAffine"),
    *("RandomPerspective", "RandomCrop", "RandomResizedCrop", "CenterCrop", "Resize", "Pad"),
    *("ElasticTransform", "RandAugment", "AutoAugment", "TrivialAugmentWide", "AugMix"),
    *("FiveCrop", "TenCrop"),
}
_MONAI = ("monai.transforms.spatial.", "monai.transforms.croppad.")
_MOST_PARTS = 256
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
    while waiting and seen < _MOST_PARTS:
        part, seen = waiting.pop(0), seen + 1
        yield part
        inner = getattr(part, "transforms", None)
        waiting += inner if isinstance(inner, list | tuple) else []
        single = getattr(part, "transform", None)
        waiting += [single] if callable(single) and not isinstance(single, type) else []
        waiting += part.children() if isinstance(part, nn.Module) else []
