"""Forms of the samples of PyTorch data sets, converted to pixels and targets.

A sample is a pair (image, target), or a dict. Images are tensors (channels, rows, columns), arrays
(rows, columns, channels), or PIL images; volumes have slices before the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from spatialdl.data.format import UNLABELLED
from spatialdl.data.image_source import Pixels, as_mask, image_dtype

IMAGE_KEYS = ("image", "img", "pixel_values", "images", "input")
LABEL_KEYS = ("label", "labels", "target", "targets", "class", "fine_label")
MASK_KEYS = ("mask", "masks", "seg", "segmentation", "annotation", *LABEL_KEYS)
_FEW = 4  # channels; with _MANY, used to detect a wrong channel dim
_MANY = 16


class Decoded(NamedTuple):
    """A sample.

    Attributes:
        pixels: ([slices,] rows, columns, channels).
        target: class, int64 (); values, float64 (targets,); or mask, uint8 ([slices,] rows,
            columns).
    """

    pixels: Pixels
    target: npt.NDArray[Any]


@dataclass(frozen=True)
class SampleForm:
    """How the samples of a data set are converted.

    Attributes:
        task: task of the run, which determines the form of a target.
        keys: keys of image and target in a dict, or their indices in a tuple; None searches for
            common names.
        channel_dim: "first" or "last"; None: first for tensors, last for arrays.
        dims: spatial dims of an image, 1 to 3; None infers them: with channels, an image has up to
            three dims, a volume four.
    """

    task: str = "classification"
    keys: tuple[str | int, str | int] | None = None
    channel_dim: str | None = None
    dims: int | None = None

    def decoded(self, sample: Any) -> Decoded:
        """Pixels and target of a sample.

        Raises:
            ValueError: the form of the sample is unknown.
        """
        image, target = self.parts(sample)
        pixels = self.pixels(image)
        if self.task == "segmentation":
            return Decoded(pixels, self._mask(target, pixels.shape[:-1]))
        if self.task == "classification":
            return Decoded(pixels, _class(target))
        return Decoded(pixels, _numbers(target, binary=self.task == "multilabel"))

    def parts(self, sample: Any) -> tuple[Any, Any]:
        """Image and target.

        Raises:
            ValueError: see `decoded`.
        """
        if isinstance(sample, list) and len(sample) == 1 and isinstance(sample[0], Mapping):
            sample = sample[0]  # MONAI returns crops as lists
        if isinstance(sample, Mapping):
            image, target = self.names(sample)
            return sample[image], sample[target]
        if isinstance(sample, list) and sample and isinstance(sample[0], Mapping):
            raise ValueError(
                f"it is a list of {len(sample)} samples, expected one: make the transform return "
                "one (num_samples=1)"
            )
        if not isinstance(sample, tuple | list):
            raise ValueError(f"it is {shown(sample)}, expected (image, target) or a dict")
        if self.keys is not None and all(isinstance(key, int) for key in self.keys):
            if max(self.keys) >= len(sample):  # type: ignore[operator]
                raise ValueError(f"it has {len(sample)} parts, but data.keys={list(self.keys)}")
            return sample[self.keys[0]], sample[self.keys[1]]  # type: ignore[index]
        if len(sample) != 2:
            raise ValueError(
                f"it has {len(sample)} parts, expected (image, target): set the indices of both, "
                "such as data.keys=[0,1]"
            )
        return sample[0], sample[1]

    def names(self, sample: Mapping[str, Any]) -> tuple[str | int, str | int]:
        """The keys of image and target in a dict.

        Raises:
            ValueError: a key is missing.
        """
        given = self.keys or (None, None)
        usual = IMAGE_KEYS, MASK_KEYS if self.task == "segmentation" else LABEL_KEYS
        found: list[str | int] = []
        for what, key, names in zip(("image", "target"), given, usual, strict=True):
            there = [name for name in ((key,) if key is not None else names) if name in sample]
            if not there:
                wanted = ", ".join(map(str, names)) if key is None else repr(key)
                raise ValueError(
                    f"it has no {what} under {wanted}, its keys are "
                    f"{', '.join(map(str, sample))}: set data.keys=[IMAGE,TARGET]"
                )
            found.append(there[0])
        return found[0], found[1]

    def pixels(self, image: Any) -> Pixels:
        """Convert an image to ([slices,] rows, columns, channels).

        Raises:
            ValueError: not an image, or of other dims.
        """
        array, is_first = _array(_rgb(image), "image")
        array = np.asarray(array, image_dtype(array.dtype))
        dims = self.dims or (3 if array.ndim == 4 else 2)
        if array.ndim not in (dims, dims + 1) or 0 in array.shape:
            expected = "channels and " * (array.ndim > dims) + f"{dims} spatial dims"
            raise ValueError(f"the image has shape {array.shape}, expected {expected}")
        if array.ndim == dims:
            return array[..., None]
        if self.channel_dim is None:
            _check_channel_dim(array.shape, is_first)
        else:
            is_first = self.channel_dim == "first"
        return np.moveaxis(array, 0, -1) if is_first else array

    def _mask(self, mask: Any, size: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        array, is_first = _array(mask, "mask")
        if self.channel_dim is not None:
            is_first = self.channel_dim == "first"
        if array.ndim == len(size) + 1:
            channels = array.shape[0 if is_first else -1]
            if channels != 1:
                raise ValueError(
                    f"the mask has shape {array.shape}, which is {channels} channels: give the "
                    "class index of each pixel (argmax of a one-hot mask)"
                )
            array = array[0] if is_first else array[..., 0]
        if array.dtype.kind == "f":
            whole = np.rint(array)
            if not (np.isfinite(array).all() and (whole == array).all()):
                raise ValueError("the mask has non-integer values, expected class indices")
            array = whole.astype(np.int64)
        if array.size and array.min() < 0:
            raise ValueError(
                f"the mask has negative values, down to {array.min()}: mark pixels without a class "
                f"with {UNLABELLED}"
            )
        return as_mask(array, size)


def shown(value: Any) -> str:
    """Short description of a value for messages."""
    shape = getattr(value, "shape", None)
    of_shape = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return "None" if value is None else f"a {type(value).__name__}{of_shape}"


def _check_channel_dim(shape: tuple[int, ...], is_first: bool) -> None:
    """Reject images whose shape suggests that the channels are in another dim."""
    here, there = (shape[0], shape[-1]) if is_first else (shape[-1], shape[0])
    if here > _MANY and there <= _FEW:
        kind, place, other = ("tensor", "first", "last") if is_first else ("array", "last", "first")
        raise ValueError(
            f"the image is {'a' if is_first else 'an'} {kind} of shape {shape}, with channels in "
            f"the {place} dim: set data.channel_dim={other}, or {place} to confirm it"
        )


def _rgb(image: Any) -> Any:
    """Convert PIL images of palette, bilevel and non-RGB modes."""
    mode = getattr(image, "mode", None)
    if isinstance(mode, str) and hasattr(image, "convert"):
        if mode == "1":
            return image.convert("L")
        if mode in ("P", "PA", "CMYK", "YCbCr", "HSV", "LAB"):
            return image.convert("RGB")
    return image


def _array(value: Any, what: str) -> tuple[npt.NDArray[Any], bool]:
    """The value as an array, and whether it was a tensor, whose channels come first."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().as_subclass(torch.Tensor).cpu()
        if plain.dtype == torch.bfloat16:
            raise ValueError(f"the {what} has type bfloat16, expected float32: convert it first")
        return plain.numpy(), True
    if isinstance(value, np.ndarray):
        return value, False
    if hasattr(value, "convert") and hasattr(value, "mode"):
        return np.asarray(value), False
    raise ValueError(f"the {what} is {shown(value)}, expected a tensor, an array or a PIL image")


def _class(target: Any) -> npt.NDArray[np.int64]:
    array = _plain(target)
    if array.size != 1:
        raise ValueError(
            f"the target has shape {array.shape}, task=classification takes a class index: take "
            "the argmax of a one-hot vector, or use task=multilabel, regression or segmentation"
        )
    if array.dtype.kind not in "biu":
        raise ValueError(
            f"the target is {array.reshape(-1)[0]!r}, task=classification takes a class index, "
            "a whole number from 0"
        )
    return np.asarray(array.reshape(()), np.int64)


def _numbers(target: Any, *, binary: bool) -> npt.NDArray[np.float64]:
    array = _plain(target)
    task = "multilabel" if binary else "regression"
    if array.ndim > 1 or array.dtype.kind not in "biuf" or not array.size:
        raise ValueError(
            f"the target is {shown(array)} and {array.dtype}, task={task} takes a vector of numbers"
        )
    numbers = np.array(array.reshape(-1), np.float64)
    if binary:
        numbers[numbers == -1] = math.nan
        wrong = numbers[~(np.isnan(numbers) | np.isin(numbers, (0, 1)))]
        if len(wrong):
            raise ValueError(
                f"the target has the value {wrong[0]:g}, task=multilabel takes 1 (present), 0 "
                "(absent) or NaN (unknown)"
            )
    if np.isinf(numbers).any():
        raise ValueError("the target has infinite values: mark unknown values with NaN")
    return numbers


def _plain(target: Any) -> npt.NDArray[Any]:
    if isinstance(target, torch.Tensor):
        return target.detach().as_subclass(torch.Tensor).cpu().numpy()
    if isinstance(target, bool | int | float | np.generic | np.ndarray):
        return np.asarray(target)
    is_numbers = isinstance(target, tuple | list) and all(
        isinstance(one, bool | int | float | np.generic) for one in target
    )
    if is_numbers and target:
        return np.asarray(target)
    raise ValueError(
        f"the target is {shown(target)}" + f" ({target!r})" * isinstance(target, str) + ", expected"
        " numbers"
    )
