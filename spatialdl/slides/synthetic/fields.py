"""Random fields as functions of the position, so that blocks can be drawn independently."""

from __future__ import annotations

from math import pi

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Axis = npt.NDArray[np.float64]  # positions along rows or columns


class Waves:
    """A smooth random field: a sum of plane waves in all directions, of variance 1."""

    def __init__(
        self, random: np.random.Generator, wavelength: float, spread: float, count: int
    ) -> None:
        # directions evenly around the circle, so that the field is isotropic
        direction = (np.arange(count) + random.uniform(0, 1, count)) * 2 * pi / count
        number = 2 * pi / (wavelength * (1 + spread * random.uniform(-1, 1, count)))
        self._down = number * np.sin(direction)
        self._across = number * np.cos(direction)
        self._phase = random.uniform(0, 2 * pi, count)

    def __call__(self, rows: Axis, cols: Axis) -> Floats:
        """Evaluate the field at every (row, column), as a matrix product: cos(a + b) separates."""
        a = rows[:, None] * self._down + self._phase
        b = cols[:, None] * self._across
        left = np.concatenate([np.cos(a), -np.sin(a)], 1).astype(np.float32)
        right = np.concatenate([np.cos(b), np.sin(b)], 1).astype(np.float32)
        return np.asarray(left @ right.T * np.float32((2 / len(self._phase)) ** 0.5), np.float32)


def hashed(
    key: int, i: npt.NDArray[np.int64], j: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.float64]:
    """Return `count` pseudo-random numbers in [0, 1) for every cell (i, j): (cells, count)."""
    with np.errstate(over="ignore"):
        x = i.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = mix(x ^ mix(j.astype(np.uint64) + np.uint64(key)))
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
        mixed = mix(x[:, None] + steps)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
