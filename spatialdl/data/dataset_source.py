"""Map-style PyTorch data sets as an image source that is read by boxes.

The data set makes a whole sample, and the box is cut from it. The last sample is cached, because
its image, mask and target are read one after the other.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset
from tqdm import tqdm

from spatialdl.common.configuring.plugins import describe_cause
from spatialdl.data.format import UNLABELLED
from spatialdl.data.image_source import Box, Pixels, Size, check_box, pairs, whole_box
from spatialdl.data.sample_forms import Decoded, SampleForm
from spatialdl.data.sample_generators import Seed, own_generators, seeded
from spatialdl.data.sample_transforms import SampleTransforms

log = logging.getLogger("spatialdl.data")


_SPREAD = (1, 0.5, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875)
"""Positions of probed samples; data sets are often sorted by class, so the last one is first."""


class DatasetSource:
    """The samples of a user's data set, the same in every process, epoch by epoch.

    It is an `ImageSource` of epoch 0, unless another one is named. It is for one thread; no other
    thread may draw random numbers at the same time.

    Args:
        dataset: has `__len__` and `__getitem__`.
        form: form of its samples.
        name: name of the data set in messages.
        seed: seed of its random transforms.
        classes: names of the classes.
        transforms: transforms of its samples, see `SampleTransforms`.

    Attributes:
        channels, dtype: the same for every image.

    Raises:
        ValueError: not a map-style data set, empty, or the form of its first sample is unknown.
    """

    seeds_generators = True

    def __init__(
        self,
        dataset: Any,
        form: SampleForm,
        *,
        name: str = "the data set",
        seed: int = 0,
        classes: Sequence[str] = (),
        transforms: Sequence[Callable[..., Any]] = (),
    ) -> None:
        check_map_style(dataset, name)
        self.dataset, self.name, self.classes = dataset, name, list(classes)
        self._num_classes: int | None = None
        self._size: Size | None = None
        self._form, self._seed = form, seed
        self._transforms = SampleTransforms(transforms, form)
        self._labels: npt.NDArray[Any] | None = None
        self._own: list[Seed] | None = None
        self._last: tuple[tuple[int, int], Decoded] | None = None
        self.channels = 0  # unknown before the first sample
        first = self._decoded(0, 0)
        self._form = replace(form, dims=first.pixels.ndim - 1)
        self.channels, self.dtype = first.pixels.shape[-1], first.pixels.dtype
        self._target_shape = () if self.has_masks else first.target.shape
        self._last = (0, 0), first

    def __len__(self) -> int:
        return len(self.dataset)

    def expect(self, num_classes: int | None, size: Size | None) -> None:
        """Check the number of classes and the size of all samples from now on, where not None.

        Raises:
            ValueError: the first sample does not match.
        """
        self._num_classes, self._size = num_classes, size
        self._last = None
        self.decoded(0, 0)

    def probe(self, seconds: float = 2.0) -> None:
        """Check samples spread over the data set, so that errors are found before ranks start.

        Args:
            seconds: no further sample is read after this time.

        Raises:
            ValueError: one cannot be read, or does not match the first.
        """
        end, last = time.monotonic() + seconds, len(self) - 1
        spread = [round(last * part) for part in _SPREAD]
        for number in dict.fromkeys([*_extreme_labels(self.dataset), *spread]):
            self.decoded(0, number)
            if time.monotonic() > end:
                break
        self._last = None

    @property
    def has_masks(self) -> bool:
        """Whether targets are masks."""
        return self._form.task == "segmentation"

    @property
    def no_labels(self) -> npt.NDArray[Any]:
        """An empty array with the type and shape of labels."""
        kind = np.int64 if self._target_shape == () else np.float64
        return np.zeros((0, *self._target_shape), kind)

    @property
    def labels(self) -> npt.NDArray[Any]:
        """Labels of all samples in epoch 0; reads all samples unless the labels were set."""
        if self._labels is None:
            log.info("%s: reading all samples for their labels", self.name)
            numbers = tqdm(range(len(self)), "labels", leave=False, mininterval=2, delay=2)
            found = [self.target(0, number) for number in numbers]
            self._labels = np.stack(found)
        return self._labels

    @labels.setter
    def labels(self, found: npt.NDArray[Any]) -> None:
        self._labels = found

    def image_size(self, sample: int, epoch: int = 0) -> Size:
        """([slices,] rows, columns) of a sample."""
        return self.decoded(epoch, sample).pixels.shape[:-1]

    def read(self, sample: int, box: Box | None = None, epoch: int = 0) -> Pixels:
        """A box of an image."""
        return _cut(self.decoded(epoch, sample).pixels, box, sample, 1)

    def read_mask(
        self, sample: int, box: Box | None = None, epoch: int = 0
    ) -> npt.NDArray[np.uint8]:
        """A box of a mask."""
        if not self.has_masks:
            raise ValueError(f"{self.name} has no masks")
        return _cut(self.decoded(epoch, sample).target, box, sample, 0)

    def target(self, epoch: int, sample: int) -> npt.NDArray[Any]:
        """Target of a sample: class, int64 (), or values, float64 (targets,); -1 with masks."""
        target = self.decoded(epoch, sample).target
        return np.asarray(-1) if self.has_masks else target

    def digest(self, epoch: int, sample: int) -> str:
        """Digest of a sample, which is made anew."""
        self._last = None
        found = self.decoded(epoch, sample)
        text = hashlib.sha256(f"{found.pixels.shape} {found.pixels.dtype}".encode())
        for array in found:
            text.update(np.ascontiguousarray(array).tobytes())
        return text.hexdigest()[:16]

    def decoded(self, epoch: int, sample: int) -> Decoded:
        """A whole sample.

        Raises:
            ValueError: it does not match the first sample, or its form is unknown.
        """
        if self._last is None or self._last[0] != (epoch, sample):
            self._last = None  # keeps one whole sample in memory, not two
            self._last = (epoch, sample), self._decoded(epoch, sample)
        return self._last[1]

    def _decoded(self, epoch: int, sample: int) -> Decoded:
        if self._own is None:
            self._own = own_generators((self.dataset, self._transforms.transforms))
        try:
            with seeded(self._own, self._seed, epoch, sample):
                given = self._transforms(self.dataset[sample])
        except OSError as error:
            cause = describe_cause(error)
            raise ValueError(
                f"sample {sample} of {self.name} cannot be read: {cause}: check the path, or leave "
                "the sample out"
            ) from error
        except Exception as error:
            error.add_note(f"sample {sample} of {self.name}")
            raise
        try:
            found = self._form.decoded(given)
            if self.channels:
                self._check_alike(found)
        except ValueError as error:
            raise ValueError(f"sample {sample} of {self.name}: {error}") from None
        return found

    def _check_alike(self, found: Decoded) -> None:
        if found.pixels.shape[-1] != self.channels:
            raise ValueError(
                f"the image has {found.pixels.shape[-1]} channels, the first sample has "
                f"{self.channels}; all samples must have the same"
            )
        if found.pixels.dtype != self.dtype:
            raise ValueError(
                f"the image has type {found.pixels.dtype}, the first sample has {self.dtype}; "
                "all samples must have the same"
            )
        size = found.pixels.shape[:-1]
        if self._size not in (None, size):
            dims = ",".join(("slices", "rows", "columns")[-len(size) :])
            raise ValueError(
                f"the image is {' x '.join(map(str, size))}, expected "
                f"{' x '.join(map(str, self._size))}: all images of a batch have one size; "
                f"data.image_size=[{dims}] crops or pads them"
            )
        target, most = found.target, self._num_classes
        if not self.has_masks and target.shape != self._target_shape:
            raise ValueError(
                f"the target has {target.size} values, the first sample has "
                f"{self.no_labels.shape[-1]}"
            )
        if most is None or target.dtype.kind == "f":
            return
        highest = int(target.max(where=target != UNLABELLED, initial=0))
        lowest = int(target.min(initial=0))
        if self.has_masks and highest >= most:
            raise ValueError(
                f"the mask has a pixel of class {highest}, expected 0 to {most - 1} ({most} "
                f"classes); set data.num_classes, or mark pixels without a class with {UNLABELLED}"
            )
        if not self.has_masks and not 0 <= int(target) < most:
            named = lowest if lowest < 0 else int(target)
            raise ValueError(
                f"the class is {named}, expected 0 to {most - 1} ({most} classes); set "
                "data.num_classes, or number classes from 0"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": None, "_last": None, "_labels": None}


def _extreme_labels(dataset: Any) -> list[int]:
    """Samples with the highest and the lowest class, by an attribute as torchvision has it."""
    labels = getattr(dataset, "targets", None)
    try:
        classes = np.asarray(labels)
        if classes.shape == (len(dataset),) and classes.dtype.kind in "iu":
            return [int(classes.argmax()), int(classes.argmin())]
    except (ValueError, TypeError):
        pass
    return []


def _cut(array: Pixels, box: Box | None, sample: int, channels: int) -> Pixels:
    """A copy of a box, because the decoded sample is cached."""
    size = array.shape[: array.ndim - channels]
    box = whole_box(size) if box is None else box
    check_box(box, size, f"sample {sample}")
    return array[tuple(slice(start, stop) for start, stop in pairs(box))].copy()


def check_map_style(dataset: Any, name: str) -> None:
    """Reject data sets without samples by index.

    Raises:
        ValueError: with the type of the data set.
    """
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        iterates = isinstance(dataset, IterableDataset) or hasattr(dataset, "__iter__")
        what = "an iterable data set" if iterates else f"a {type(dataset).__name__}"
        raise ValueError(
            f"{name} is {what}, without samples by index: every rank reads any sample of any "
            "epoch; use a map-style data set, with __len__ and __getitem__"
        )
    try:
        count = len(dataset)
    except TypeError as error:
        raise ValueError(f"{name} has no length ({error})") from error
    if count == 0:
        raise ValueError(f"{name} has no samples (its length is 0)")
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise ValueError(
            f"{name} is a dict with keys {', '.join(map(str, dataset))}; select one split of it"
        )
