"""Synthetic images: the same global image in every layout, generated box by box.

Every pixel depends only on (seed, sample, row, column), so a rank generates just the box that it
needs. The class is the direction of wide stripes under strong noise; for signals, which have no
direction, their number. Volumes and signals are generated in the same way; `SyntheticMasks` and
`SyntheticTargets` have a class for every pixel, and several values for each image.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.data.image_source import extents, pairs, whole_box

Pixels = npt.NDArray[np.uint8]
STRIPES = 6.0
"""Stripes across an image of any size, so the class is visible only at large scale."""


class SyntheticDataset:
    """Deterministic images with labels.

    Args:
        samples: number of samples.
        image_size: (H, W), of volumes (D, H, W), of signals (L,).
        num_classes: labels are 0 to num_classes - 1, equally often.
        channels: channels of an image.
        seed: other seeds give other images.
    """

    has_masks = False

    def __init__(
        self,
        samples: int,
        image_size: tuple[int, ...],
        num_classes: int = 10,
        channels: int = 3,
        seed: int = 0,
    ) -> None:
        if min(samples, *image_size, num_classes, channels) < 1:
            raise ValueError(
                "synthetic data needs at least 1 sample, pixel, class and channel, got "
                f"samples={samples}, image_size={list(image_size)}, num_classes={num_classes}, "
                f"channels={channels}"
            )
        self.channels = channels
        self.classes = [str(number) for number in range(num_classes)]
        self.labels: npt.NDArray[np.int64] = np.arange(samples, dtype=np.int64) % num_classes
        self._size = image_size
        self._seed = seed

    def __len__(self) -> int:
        return len(self.labels)

    def image_size(self, sample: int) -> tuple[int, ...]:
        """Size of a sample, such as (H, W)."""
        return self._size

    def read(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """A box (row0, row1, col0, col1) of a sample: uint8 (rows, columns, channels)."""
        own = self._box(box)
        grain = noise(self._key(sample), own, self.channels)
        shown = 128 + self._stripes(sample, own)[..., None] + grain
        return np.asarray(np.clip(shown, 0, 255), dtype=np.uint8)

    def _stripes(self, sample: int, box: tuple[int, ...]) -> npt.NDArray[np.float64]:
        return 48.0 * self._waves(sample, box, np.pi * self.labels[sample] / len(self.classes))

    def _waves(self, sample: int, box: tuple[int, ...], angle: float) -> npt.NDArray[np.float64]:
        """Stripes along a direction, from -1 to 1."""
        phase = mix(self._key(sample)) / 2.0**64
        places = along(box, self._size, angle) + phase
        return np.asarray(np.sin(2 * np.pi * STRIPES * places))

    def read_mask(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """Raise, because these images have no masks; see `SyntheticMasks`.

        Raises:
            ValueError: always.
        """
        raise ValueError("synthetic images with labels have no masks")

    def _box(self, box: tuple[int, ...] | None) -> tuple[int, ...]:
        return box or whole_box(self._size)

    def _key(self, sample: int) -> np.uint64:
        return np.uint64(self._seed * 1_000_003 + sample)


def along(box: tuple[int, ...], size: tuple[int, ...], angle: float) -> npt.NDArray[np.float64]:
    """Position of each pixel of a box along a direction, relative to the image size.

    Args:
        angle: 0 is along the columns, pi / 2 along the rows (of volumes also along the slices).
            Signals are stretched by it instead.
    """
    if len(size) == 1:
        return np.arange(box[0], box[1], dtype=np.float64) / size[0] * (1 + angle)
    directions = [np.sin(angle)] * (len(size) - 1) + [np.cos(angle)]
    places = zip(_grid(pairs(box)), size, directions, strict=True)
    return sum((at / extent * part for at, extent, part in places), np.zeros(()))


def _grid(spans: Sequence[tuple[int, int]]) -> tuple[npt.NDArray[np.int64], ...]:
    """Coordinates along each dim, which broadcast to an image of these (start, stop)."""
    return np.ogrid[tuple(slice(*span) for span in spans)]


def noise(key: np.uint64, box: tuple[int, ...], channels: int) -> npt.NDArray[np.int16]:
    """Uniform noise in [-64, 64), independent per pixel and channel."""
    places: npt.NDArray[Any] = np.zeros((), np.uint64)
    for first, end in pairs(box):
        if places.ndim >= 2:  # 64 bits hold two 32-bit coordinates: earlier ones are hashed
            places = mix(places)
        places = (places[..., None] << np.uint64(32)) + np.arange(first, end, dtype=np.uint64)
    start = mix(key + np.uint64(1 << 40))
    layers = []
    for block in range(-(-channels // 8)):
        bits = mix(start + np.uint64(block) + places)
        layers.append(np.ascontiguousarray(bits).view(np.uint8).reshape(*bits.shape, 8))
    values = np.concatenate(layers, axis=-1)[..., :channels]
    return (values.astype(np.int16) - 128) // 2


def mix(x: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea, Flood 2014): a counter in, independent bits out."""
    with np.errstate(over="ignore"):
        z = np.asarray(x, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


DISCS = 12
"""Discs per image, with radii from 1/16 to 1/4 of its shortest side."""


class Disc(NamedTuple):
    """Position of a disc, in pixels, and its class."""

    centre: tuple[int, ...]
    radius: int
    label: int


class SyntheticMasks(SyntheticDataset):
    """Deterministic images with masks; arguments as for `SyntheticDataset`."""

    has_masks = True

    def read(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """A box (row0, row1, col0, col1) of a sample: uint8 (rows, columns, channels)."""
        colours = _colours(len(self.classes), self.channels)
        pixels = colours[self.read_mask(sample, box)]
        pixels += noise(self._key(sample), self._box(box), self.channels)
        return np.asarray(np.clip(pixels, 0, 255), dtype=np.uint8)

    def read_mask(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """The class of every pixel of a box: uint8 (rows, columns)."""
        own = self._box(box)
        mask = np.zeros(extents(own), np.uint8)
        for disc in self._discs(sample):
            _draw(mask, own, disc)
        return mask

    def _discs(self, sample: int) -> list[Disc]:
        numbers = len(self._size) + 2
        draws = mix(
            self._key(sample)
            + (np.uint64(1) << np.uint64(41))
            + np.arange(numbers * DISCS, dtype=np.uint64)
        )
        shorter, classes = min(self._size), len(self.classes)
        discs = []
        for *places, radius, label in draws.reshape(DISCS, numbers).tolist():
            span = 3 * shorter // 16 + 1
            centre = tuple(place % n for place, n in zip(places, self._size, strict=True))
            discs.append(Disc(centre, shorter // 16 + radius % span, label % classes))
        return discs


def _draw(mask: Pixels, box: tuple[int, ...], disc: Disc) -> None:
    """Fill the part of a disc that lies in `box`."""
    inside = [
        (max(start, place - disc.radius), min(stop, place + disc.radius + 1))
        for (start, stop), place in zip(pairs(box), disc.centre, strict=True)
    ]
    if any(start >= stop for start, stop in inside):
        return
    places = zip(_grid(inside), disc.centre, strict=True)
    squares = sum(((at - place) ** 2 for at, place in places), np.zeros((), np.int64))
    window = tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(inside, pairs(box), strict=True)
    )
    mask[window][squares <= disc.radius * disc.radius] = disc.label


@lru_cache(maxsize=16)
def _colours(classes: int, channels: int) -> npt.NDArray[np.int16]:
    """(classes, channels) around 128: evenly spread in the first channel, random in the rest."""
    values = mix(np.arange(classes * channels, dtype=np.uint64)).reshape(classes, channels)
    colours = 80 + (values % np.uint64(97)).astype(np.int16)
    colours[:, 0] = 80 + 96 * np.arange(classes) // max(classes - 1, 1)
    return colours


_STRENGTHS = np.uint64(1) << np.uint64(42)


class SyntheticTargets(SyntheticDataset):
    """Deterministic images with targets; arguments as for `SyntheticDataset`.

    Args:
        num_classes: targets per image, float64 (samples, num_classes).
        present: whether targets are 0 or 1, for multi-label tasks.
    """

    def __init__(
        self,
        samples: int,
        image_size: tuple[int, ...],
        num_classes: int = 10,
        channels: int = 3,
        seed: int = 0,
        *,
        present: bool,
    ) -> None:
        super().__init__(samples, image_size, num_classes, channels, seed)
        draws = mix(
            self._key(0) * np.uint64(num_classes)
            + _STRENGTHS
            + np.arange(samples * num_classes, dtype=np.uint64)
        )
        strengths = draws.reshape(samples, num_classes) / 2.0**64
        targets = np.floor(2 * strengths) if present else strengths
        self.labels = targets  # type: ignore[assignment]

    def _stripes(self, sample: int, box: tuple[int, ...]) -> npt.NDArray[np.float64]:
        total = np.zeros(())
        for number, strength in enumerate(self.labels[sample]):
            total = total + strength * self._waves(sample, box, np.pi * number / len(self.classes))
        return 64.0 / sqrt(len(self.classes)) * total
