"""Synthetic images: the same global picture in every layout, made box by box.

Every pixel follows from (seed, sample, row, column) alone, so a rank makes just the box that it
needs. The class is the direction of wide stripes under strong noise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
STRIPES = 6.0
"""Stripes across an image, whatever its size: the class is visible at large scale only."""


class SyntheticDataset:
    """Deterministic images with labels.

    Args:
        samples: how many.
        image_size: (H, W).
        num_classes: labels are 0 to num_classes - 1, equally often.
        channels: of an image.
        seed: other seeds give other images.
    """

    has_masks = False

    def __init__(
        self,
        samples: int,
        image_size: tuple[int, int],
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

    def image_size(self, sample: int) -> tuple[int, int]:
        """(H, W) of a sample."""
        return self._size

    def read(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """A box (row0, row1, col0, col1) of a sample: uint8 (rows, columns, channels)."""
        height, width = self._size
        row0, row1, col0, col1 = own = self._box(box)
        rows = np.arange(row0, row1, dtype=np.float64)[:, None] / height
        cols = np.arange(col0, col1, dtype=np.float64)[None, :] / width
        angle = np.pi * self.labels[sample] / len(self.classes)
        phase = mix(self._key(sample)) / 2.0**64
        waves = rows * np.sin(angle) + cols * np.cos(angle) + phase
        stripes = 48.0 * np.sin(2 * np.pi * STRIPES * waves)
        grain = noise(self._key(sample), own, self.channels)
        return np.asarray(np.clip(128 + stripes[..., None] + grain, 0, 255), dtype=np.uint8)

    def read_mask(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """Not here; see `SyntheticMasks`.

        Raises:
            ValueError: always.
        """
        raise ValueError("synthetic images with labels have no masks")

    def _box(self, box: tuple[int, ...] | None) -> tuple[int, ...]:
        return box or (0, self._size[0], 0, self._size[1])

    def _key(self, sample: int) -> np.uint64:
        return np.uint64(self._seed * 1_000_003 + sample)


def noise(key: np.uint64, box: tuple[int, ...], channels: int) -> npt.NDArray[np.int16]:
    """Equally distributed in [-64, 64), independent per pixel and channel."""
    row0, row1, col0, col1 = box
    rows = np.arange(row0, row1, dtype=np.uint64)[:, None]
    cols = np.arange(col0, col1, dtype=np.uint64)[None, :]
    start = mix(key + np.uint64(1 << 40))
    layers = []
    for block in range(-(-channels // 8)):
        bits = mix(start + np.uint64(block) + (rows << np.uint64(32)) + cols)
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
