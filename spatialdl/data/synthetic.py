"""Synthetic images: the same global image in every layout, generated box by box.

Every pixel depends only on (seed, sample, row, column), so a rank generates just the box that it
needs. The class is the direction of wide stripes under strong noise; for signals, which have no
direction, their number. Volumes and signals are generated in the same way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.data.image_source import pairs, whole_box

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
    far = np.zeros(())
    for number, ((first, end), extent) in enumerate(zip(pairs(box), size, strict=True)):
        part = np.cos(angle) if number == len(size) - 1 else np.sin(angle)
        places = np.arange(first, end, dtype=np.float64) / extent
        far = far[..., None] + places * part
    return far


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
