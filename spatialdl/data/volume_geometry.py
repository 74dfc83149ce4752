"""Orientation of volumes in the patient, and conversion between orientations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from spatialdl.common import fields
from spatialdl.data.image_source import Box, pairs
from spatialdl.data.samples import VolumeSample, spacing_of

T = TypeVar("T", int, float)

_ENDS = ("LR", "PA", "IS")  # of the axes of RAS+: left/right, posterior/anterior, inferior/superior
_NEAR = 1.1
"""Spacings that differ by at most this factor are considered equal."""


def orientation_of(affine: npt.ArrayLike) -> str:
    """Directions of slices, rows and columns, the nearest ones if oblique, e.g. "SAR".

    nibabel lists the dims of files (columns, rows, slices): it returns "RAS" for the same volume.

    Args:
        affine: (3, 4), which maps (slice, row, column, 1) to millimetres in RAS+.
    """
    steps = np.asarray(affine, np.float64)[:, :3]
    steps = steps / np.maximum(np.linalg.norm(steps, axis=0), np.finfo(np.float64).tiny)
    axes = max(permutations(range(3)), key=lambda p: sum(abs(steps[a, k]) for k, a in enumerate(p)))
    return "".join(_ENDS[axis][int(steps[axis, k] > 0)] for k, axis in enumerate(axes))


@dataclass(frozen=True)
class VolumeTurn:
    """Converts stored volumes to the network's orientation by transposing and flipping dims.

    Attributes:
        dims: the stored dim of each network dim.
        reversed: network dims that are flipped.
    """

    dims: tuple[int, ...] = (0, 1, 2)
    reversed: tuple[int, ...] = ()

    @classmethod
    def between(cls, stored: str, seen: str) -> Self:
        """The turn from one orientation to another; see `orientation_of`."""
        ends = [next(pair for pair in _ENDS if letter in pair) for letter in seen]
        dims = [next(k for k, one in enumerate(stored) if one in pair) for pair in ends]
        wrong = (k for k, dim in enumerate(dims) if stored[dim] != seen[k])
        return cls(tuple(dims), tuple(wrong))

    def seen_size(self, stored: Sequence[T]) -> tuple[T, ...]:
        """Size, or spacing, in network orientation."""
        return tuple(stored[dim] for dim in self.dims)

    def stored_box(self, box: Box, seen: Iterable[int]) -> Box:
        """The stored box of a box in network orientation, whose whole size is `seen`."""
        found = [(0, 0)] * 3
        for k, ((start, stop), n) in enumerate(zip(pairs(box), seen, strict=True)):
            found[self.dims[k]] = (n - stop, n - start) if k in self.reversed else (start, stop)
        return tuple(number for span in found for number in span)

    def seen(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Stored voxels (slices, rows, columns, ...) in network orientation."""
        rest = range(3, stored.ndim)
        return np.flip(stored.transpose(*self.dims, *rest), self.reversed)

    def stored(self, seen: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Voxels in network orientation, (slices, rows, columns), in stored orientation."""
        return np.flip(seen, self.reversed).transpose(np.argsort(self.dims))


@dataclass(frozen=True)
class Geometry:
    """Common geometry of the volumes of a training set.

    Attributes:
        orientation: of all volumes; None if they differ or one is unknown.
        spacing: (smallest, largest) along each dim, in millimetres; None if one is unknown.
    """

    orientation: str | None = None
    spacing: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    @classmethod
    def of(cls, samples: Iterable[VolumeSample]) -> Self:
        """Geometry of the samples of a data set."""
        known = [(sample.affine, sample.spacing) for sample in samples]
        codes = {None if affine is None else orientation_of(affine) for affine, _ in known}
        spacings = [spacing for _, spacing in known if spacing is not None]
        within = None
        if len(spacings) == len(known) > 0:
            within = (
                tuple(map(min, *spacings, spacings[0])),
                tuple(map(max, *spacings, spacings[0])),
            )
        return cls(codes.pop() if len(codes) == 1 else None, within)

    @classmethod
    def parsed(cls, row: Mapping[str, Any]) -> Self:
        """Geometry from a checkpoint.

        Raises:
            KeyError, ValueError: a value is missing or invalid.
        """
        code, spacing = row["orientation"], row["spacing"]
        if code is not None and not _is_orientation(fields.text(row, "orientation")):
            raise ValueError(f"orientation is {fields.shown(code)}, expected one such as SAR")
        if spacing is None:
            return cls(code)
        if not isinstance(spacing, list) or len(spacing) != 2:
            raise ValueError(f"spacing is {fields.shown(spacing)}, expected smallest and largest")
        return cls(code, (spacing_of(spacing[0]), spacing_of(spacing[1])))

    def described(self) -> dict[str, Any]:
        """Values to record in checkpoints."""
        spacing = None if self.spacing is None else [list(one) for one in self.spacing]
        return {"orientation": self.orientation, "spacing": spacing}

    def turn(self, affine: npt.ArrayLike | None) -> VolumeTurn:
        """The turn from a volume with this affine to the orientation of the training set."""
        if affine is None or self.orientation is None:
            return VolumeTurn()
        return VolumeTurn.between(orientation_of(affine), self.orientation)

    def remark(self, spacing: tuple[float, ...] | None) -> str:
        """Warning about a volume whose spacing in network orientation differs; else empty."""
        if self.spacing is None:
            return ""
        least, most = self.spacing
        trained = shown_spacing(least)
        if any(high > _NEAR * low for low, high in zip(least, most, strict=True)):
            trained += f" to {shown_spacing(most)}"
        if spacing is None:
            return f"its spacing is unknown, the training set has {trained} mm"
        within = zip(least, spacing, most, strict=True)
        if all(low / _NEAR <= here <= high * _NEAR for low, here, high in within):
            return ""
        return (
            f"its voxels are {shown_spacing(spacing)} mm (slices x rows x columns), the training "
            f"set has {trained} mm: resample it, or the prediction is unreliable"
        )


def shown_spacing(spacing: Iterable[float]) -> str:
    """Spacing in millimetres as text."""
    return " x ".join(f"{length:.3g}" for length in spacing)


def _is_orientation(text: str) -> bool:
    return len(text) == 3 and all(sum(one in pair for one in text) == 1 for pair in _ENDS)
