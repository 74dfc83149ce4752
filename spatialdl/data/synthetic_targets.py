"""Synthetic images with several numbers each: the strengths of stripes of several directions.

Where there are labels of several classes, a strength is 0 or 1; else it lies between them.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from spatialdl.data.synthetic import STRIPES, Pixels, SyntheticDataset, along, mix, noise

_STRENGTHS = np.uint64(1) << np.uint64(42)


class SyntheticTargets(SyntheticDataset):
    """Deterministic images with targets; arguments as of `SyntheticDataset`.

    Args:
        num_classes: targets of an image, float64 (samples, num_classes).
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

    def read(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """A box (row0, row1, col0, col1) of a sample: uint8 (rows, columns, channels)."""
        own, total = self._box(box), np.zeros(())
        phase = mix(self._key(sample)) / 2.0**64
        for number, strength in enumerate(self.labels[sample]):
            angle = np.pi * number / len(self.classes)
            waves = along(own, self._size, angle) + phase
            total = total + strength * np.sin(2 * np.pi * STRIPES * waves)
        stripes = 64.0 / sqrt(len(self.classes)) * total
        grain = noise(self._key(sample), own, self.channels)
        return np.asarray(np.clip(128 + stripes[..., None] + grain, 0, 255), dtype=np.uint8)
