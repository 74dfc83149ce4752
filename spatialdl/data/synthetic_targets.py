"""Synthetic images with several values each: the strengths of stripes of several directions.

For multi-label tasks a strength is 0 or 1; otherwise it lies in between.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
import numpy.typing as npt

from spatialdl.data.synthetic import SyntheticDataset, mix

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
