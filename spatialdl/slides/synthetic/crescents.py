"""Glands bent to crescents: what they are like says nothing, how they stand to each other all.

Two columns of crescents, some 1,000 pixels apart. In a "facing" slide the open sides of a pair
look at each other, in an "averted" one away: ``( )`` has become ``) (``. As many are open to the
left as to the right in both, and where they stand is jittered by more than a small window, so a
window without both columns, or a border, has nothing to tell the kinds apart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spatialdl.slides.synthetic.fields import Axis

APART = 1024.0  # pixels between the columns, on average
_JITTER = 160.0  # of a crescent's place, in all directions
_DOWN = 480.0  # pixels between the rows
_RADIUS, _BITE = 105.0, 95.0  # of the disc, and of the disc taken out of it
_ASIDE = 62.0  # pixels between the centres of these two


class Crescents:
    """The cores of the lumens of one slide.

    Args:
        random: where they stand follows from it; not whether they face each other.
        size: rows and columns of the slide.
        facing: whether the open sides of a pair look at each other.
    """

    def __init__(self, random: np.random.Generator, size: tuple[int, int], facing: bool) -> None:
        rows, cols = size
        count = max(1, round(rows / _DOWN))
        down = (np.arange(count) + 0.5) * rows / count
        place = np.stack(np.meshgrid(down, [-APART / 2, APART / 2], indexing="ij"), -1)
        place[..., 1] += cols / 2
        place += random.uniform(-_JITTER, _JITTER, place.shape)
        open_to = np.broadcast_to([1.0, -1.0] if facing else [-1.0, 1.0], place.shape[:2])
        self._all = np.concatenate([place, open_to[..., None]], -1).reshape(-1, 3)

    def __call__(self, rows: Axis, cols: Axis) -> npt.NDArray[np.bool_]:
        """Whether each (row, column) is in a core."""
        inside = np.zeros((len(rows), len(cols)), bool)
        for row, col, open_to in self._all.tolist():
            dy, dx = rows[:, None] - row, cols[None, :] - col
            disc = dy**2 + dx**2 < _RADIUS**2
            inside |= disc & (dy**2 + (dx - open_to * _ASIDE) ** 2 > _BITE**2)
        return inside
