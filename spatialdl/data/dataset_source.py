"""A map-style data set of PyTorch's kind as a source of images that are read by boxes.

Whole samples are made, as the data set makes them, and the box is cut out; the last one is kept, as
its image, mask and target are asked for one after the other.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset
from tqdm import tqdm

from spatialdl.data.format import UNLABELLED
from spatialdl.data.image_source import Box, Pixels, Size, check_box, pairs, whole_box
from spatialdl.data.sample_forms import Decoded, SampleForm
from spatialdl.data.sample_generators import Seed, own_generators, seeded
from spatialdl.data.sample_transforms import SampleTransforms

log = logging.getLogger("spatialdl.data")


class DatasetSource:
    """The samples of a user's data set, the same in every process, epoch by epoch.

    It is an `ImageSource` of epoch 0; `at` gives those of others. It is for one thread, in which
    nothing else draws random numbers meanwhile.

    Args:
        dataset: has `__len__` and `__getitem__`.
        form: of its samples.
        name: of the data set, for messages.
        seed: of what its transforms draw.
        classes: names of the classes.
        transforms: of its samples, see `SampleTransforms`.

    Attributes:
        channels, dtype: of every image.

    Raises:
        ValueError: it is no such data set, empty, or its first sample has no form that is known.
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
        self.channels = 0  # until the first sample is known
        first = self._decoded(0, 0)
        self._form = form.with_dims(first.pixels)
        self.channels, self.dtype = first.pixels.shape[-1], first.pixels.dtype
        self._target_shape = () if self.has_masks else first.target.shape
        self._last = (0, 0), first

    def __len__(self) -> int:
        return len(self.dataset)

    def expect(self, num_classes: int | None, size: Size | None) -> None:
        """Refuse from now on samples of other classes or another size, where these are given.

        Raises:
            ValueError: the first sample is such.
        """
        self._num_classes, self._size = num_classes, size
        self._last = None
        self.decoded(0, 0)

    @property
    def has_masks(self) -> bool:
        """Whether targets are masks."""
        return self._form.task == "segmentation"

    @property
    def no_labels(self) -> npt.NDArray[Any]:
        """Labels of no samples, of their type and shape."""
        kind = np.int64 if self._target_shape == () else np.float64
        return np.zeros((0, *self._target_shape), kind)

    @property
    def labels(self) -> npt.NDArray[Any]:
        """Of all samples in epoch 0; they are read for it unless they were given."""
        if self._labels is None:
            log.info("%s: all samples are read for their labels", self.name)
            numbers = tqdm(range(len(self)), "labels", leave=False, mininterval=2, delay=2)
            found = [self.target(0, number) for number in numbers]
            self._labels = np.stack(found)
        return self._labels

    @labels.setter
    def labels(self, found: npt.NDArray[Any]) -> None:
        self._labels = found

    def at(self, epoch: int) -> Epoch:
        """The images of an epoch."""
        return Epoch(self, epoch)

    def image_size(self, sample: int) -> Size:
        """([slices,] rows, columns) of a sample in epoch 0."""
        return self.at(0).image_size(sample)

    def read(self, sample: int, box: Box | None = None) -> Pixels:
        """A box of an image in epoch 0."""
        return self.at(0).read(sample, box)

    def read_mask(self, sample: int, box: Box | None = None) -> npt.NDArray[np.uint8]:
        """A box of a mask in epoch 0."""
        return self.at(0).read_mask(sample, box)

    def target(self, epoch: int, sample: int) -> npt.NDArray[Any]:
        """The class, int64 (), or numbers, float64 (targets,), of a sample; of masks -1."""
        target = self.decoded(epoch, sample).target
        return np.asarray(-1) if self.has_masks else target

    def digest(self, epoch: int, sample: int) -> str:
        """Of the bytes of a sample that is made anew."""
        self._last = None
        found = self.decoded(epoch, sample)
        text = hashlib.sha256(f"{found.pixels.shape} {found.pixels.dtype}".encode())
        for array in found:
            text.update(np.ascontiguousarray(array).tobytes())
        return text.hexdigest()[:16]

    def decoded(self, epoch: int, sample: int) -> Decoded:
        """A whole sample.

        Raises:
            ValueError: it is not like the others, or has no form that is known.
        """
        if self._last is None or self._last[0] != (epoch, sample):
            self._last = None  # or two whole samples lie in memory
            self._last = (epoch, sample), self._decoded(epoch, sample)
        return self._last[1]

    def _decoded(self, epoch: int, sample: int) -> Decoded:
        if self._own is None:
            self._own = own_generators((self.dataset, self._transforms.transforms))
        with seeded(self._own, self._seed, epoch, sample):
            given = self._transforms(self.dataset[sample])
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
                f"the image has {found.pixels.shape[-1]} channels, that of the first sample "
                f"{self.channels}: let all have the same"
            )
        if found.pixels.dtype != self.dtype:
            raise ValueError(
                f"the image has type {found.pixels.dtype}, that of the first sample {self.dtype}: "
                "let all have the same"
            )
        size = found.pixels.shape[:-1]
        if self._size not in (None, size):
            dims = ",".join(("slices", "rows", "columns")[-len(size) :])
            raise ValueError(
                f"the image is {' x '.join(map(str, size))}, others are "
                f"{' x '.join(map(str, self._size))}: one batch needs one size, to which "
                f"data.image_size=[{dims}] cuts or pads them"
            )
        target, most = found.target, self._num_classes
        if not self.has_masks and target.shape != self._target_shape:
            raise ValueError(
                f"the target has {target.size} numbers, that of the first sample "
                f"{self.no_labels.shape[-1]}"
            )
        if most is None or target.dtype.kind == "f":
            return
        highest = int(target.max(where=target != UNLABELLED, initial=0))
        lowest = int(target.min(initial=0))
        if self.has_masks and highest >= most:
            raise ValueError(
                f"the mask has a pixel of class {highest}, there are {most} (0 to {most - 1}): set "
                f"data.num_classes, or mark pixels without a class by {UNLABELLED}"
            )
        if not self.has_masks and not 0 <= int(target) < most:
            named = lowest if lowest < 0 else int(target)
            raise ValueError(
                f"the class is {named}, there are {most} (0 to {most - 1}): set data.num_classes, "
                "or number classes from 0"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": None, "_last": None, "_labels": None}


class Epoch:
    """The samples of an epoch of a `DatasetSource`, an `ImageSource`."""

    def __init__(self, source: DatasetSource, epoch: int) -> None:
        self._source, self._epoch = source, epoch

    def image_size(self, sample: int) -> Size:
        return self._source.decoded(self._epoch, sample).pixels.shape[:-1]

    def read(self, sample: int, box: Box | None = None) -> Pixels:
        return _cut(self._source.decoded(self._epoch, sample).pixels, box, sample, 1)

    def read_mask(self, sample: int, box: Box | None = None) -> npt.NDArray[np.uint8]:
        if not self._source.has_masks:
            raise ValueError(f"{self._source.name} has no masks")
        return _cut(self._source.decoded(self._epoch, sample).target, box, sample, 0)


def _cut(array: Pixels, box: Box | None, sample: int, channels: int) -> Pixels:
    """A copy of a box, as what was decoded is kept."""
    size = array.shape[: array.ndim - channels]
    box = whole_box(size) if box is None else box
    check_box(box, size, f"sample {sample}")
    return array[tuple(slice(start, stop) for start, stop in pairs(box))].copy()


def check_map_style(dataset: Any, name: str) -> None:
    """Refuse what has no samples by number.

    Raises:
        ValueError: says what it is.
    """
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        iterates = isinstance(dataset, IterableDataset) or hasattr(dataset, "__iter__")
        what = "an iterable data set" if iterates else f"a {type(dataset).__name__}"
        raise ValueError(
            f"{name} is {what}, without samples by number: every rank reads any sample of any "
            "epoch, so take a map-style data set, with __len__ and __getitem__"
        )
    try:
        count = len(dataset)
    except TypeError as error:
        raise ValueError(f"{name} does not know its length ({error})") from error
    if count == 0:
        raise ValueError(f"{name} has no samples (its length is 0)")
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise ValueError(
            f"{name} is a dict of {', '.join(map(str, dataset))}: name one split of it"
        )
