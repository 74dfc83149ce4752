"""How the voxels of volumes lie in the patient: orientations, and turns from one to another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from spatialdl.data import fields
from spatialdl.data.format import VolumeSample, spacing_of
from spatialdl.data.image_source import Box, pairs

T = TypeVar("T", int, float)

_ENDS = ("LR", "PA", "IS")  # of the axes of RAS+: to the left or right, back or front, feet or head
_NEAR = 1.1
"""Spacings that differ by no more than this factor are alike."""


def orientation_of(affine: npt.ArrayLike) -> str:
    """Where slices, rows and columns lead to, of an oblique volume nearest: "SAR", say.

    nibabel names the dims of files, which are columns, rows and slices: it has "RAS" for this.

    Args:
        affine: (3, 4), which takes (slice, row, column, 1) to millimetres in RAS+.
    """
    steps = np.asarray(affine, np.float64)[:, :3]
    steps = steps / np.maximum(np.linalg.norm(steps, axis=0), np.finfo(np.float64).tiny)
    axes = max(permutations(range(3)), key=lambda p: sum(abs(steps[a, k]) for k, a in enumerate(p)))
    return "".join(_ENDS[axis][int(steps[axis, k] > 0)] for k, axis in enumerate(axes))


@dataclass(frozen=True)
class VolumeTurn:
    """Takes stored volumes to how a network sees them, by exchanging and reversing dims.

    Attributes:
        dims: of the stored volume, for each dim that is seen.
        reversed: dims that are seen from their end.
    """

    dims: tuple[int, ...] = (0, 1, 2)
    reversed: tuple[int, ...] = ()

    @classmethod
    def between(cls, stored: str, seen: str) -> Self:
        """From one orientation to another; see `orientation_of`."""
        ends = [next(pair for pair in _ENDS if letter in pair) for letter in seen]
        dims = [next(k for k, one in enumerate(stored) if one in pair) for pair in ends]
        wrong = (k for k, dim in enumerate(dims) if stored[dim] != seen[k])
        return cls(tuple(dims), tuple(wrong))

    def seen_size(self, stored: Sequence[T]) -> tuple[T, ...]:
        """The size, or spacing, that is seen of a stored one."""
        return tuple(stored[dim] for dim in self.dims)

    def stored_box(self, box: Box, seen: Iterable[int]) -> Box:
        """Where a box of what is seen, of a size, is stored."""
        found = [(0, 0)] * 3
        for k, ((start, stop), n) in enumerate(zip(pairs(box), seen, strict=True)):
            found[self.dims[k]] = (n - stop, n - start) if k in self.reversed else (start, stop)
        return tuple(number for span in found for number in span)

    def seen(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Stored voxels (slices, rows, columns, ...) as they are seen."""
        rest = range(3, stored.ndim)
        return np.flip(stored.transpose(*self.dims, *rest), self.reversed)

    def stored(self, seen: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What is seen, (slices, rows, columns), as it is stored."""
        return np.flip(seen, self.reversed).transpose(np.argsort(self.dims))


@dataclass(frozen=True)
class Geometry:
    """What the volumes of a training set have in common.

    Attributes:
        orientation: of all of them; None if they differ, or it is not known of one.
        spacing: least and largest along each dim, in millimetres; None likewise.
    """

    orientation: str | None = None
    spacing: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    @classmethod
    def of(cls, samples: Iterable[VolumeSample]) -> Self:
        """Of samples of a data set."""
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
        """Of what a checkpoint says.

        Raises:
            KeyError, ValueError: something is missing, or cannot be.
        """
        code, spacing = row["orientation"], row["spacing"]
        if code is not None and not _is_orientation(fields.text(row, "orientation")):
            raise ValueError(f"orientation is {fields.shown(code)}, expected one such as SAR")
        if spacing is None:
            return cls(code)
        if not isinstance(spacing, list) or len(spacing) != 2:
            raise ValueError(f"spacing is {fields.shown(spacing)}, expected least and largest")
        return cls(code, (spacing_of(spacing[0]), spacing_of(spacing[1])))

    def described(self) -> dict[str, Any]:
        """As checkpoints record it."""
        spacing = None if self.spacing is None else [list(one) for one in self.spacing]
        return {"orientation": self.orientation, "spacing": spacing}

    def turn(self, affine: npt.ArrayLike | None) -> VolumeTurn:
        """From a volume with this affine to the orientation of the training set."""
        if affine is None or self.orientation is None:
            return VolumeTurn()
        return VolumeTurn.between(orientation_of(affine), self.orientation)

    def remark(self, spacing: tuple[float, ...] | None) -> str:
        """What is to be said of a volume whose voxels have this spacing as they are seen."""
        if self.spacing is None:
            return ""
        least, most = self.spacing
        trained = shown_spacing(least)
        if any(high > _NEAR * low for low, high in zip(least, most, strict=True)):
            trained += f" to {shown_spacing(most)}"
        if spacing is None:
            return f"its spacing is not known, the training set's is {trained} mm"
        within = zip(least, spacing, most, strict=True)
        if all(low / _NEAR <= here <= high * _NEAR for low, here, high in within):
            return ""
        return (
            f"its voxels are {shown_spacing(spacing)} mm (slices x rows x columns), those of the "
            f"training set {trained} mm: resample it, or do not trust the prediction"
        )


def shown_spacing(spacing: Iterable[float]) -> str:
    """Millimetres as text."""
    return " x ".join(f"{length:.3g}" for length in spacing)


def _is_orientation(text: str) -> bool:
    return len(text) == 3 and all(sum(one in pair for one in text) == 1 for pair in _ENDS)
