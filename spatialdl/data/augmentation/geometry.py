"""What is drawn per sample and epoch, and crops, flips and turns: the stored box of a box.

Draws are the same in every layout, rank and process.

An augmented image is a window on the stored one, mirrored and rotated, which may reach beyond its
edges. So a box of it is a box of the stored image, with its pixels in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.data.image_source import Box, Pixels, extents, pairs

_STREAM = 0x5EED_0A06
"""Separates these random numbers from those of the sample order."""


@dataclass(frozen=True)
class Draw:
    """Augmentation of one sample in one epoch; by default none, with a centre crop.

    Attributes:
        crop: start of the crop in slices (of volumes), rows and columns, as fractions in [0, 1) of
            the pixels outside it; None for the centre.
        flip_rows, flip_cols: mirrored top to bottom, left to right.
        turns: quarter turns counterclockwise after that.
        brightness, contrast, saturation: factors.
        hue: fraction of the colour circle, in [-0.5, 0.5].
        stain: factors of, and densities added to, hematoxylin, eosin and DAB; None for no change.
        sigma: of the blur, in pixels.
        flip_slices: whether a volume is mirrored first slice to last.
    """

    crop: tuple[float, ...] | None = None
    flip_rows: bool = False
    flip_cols: bool = False
    turns: int = 0
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0
    stain: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    sigma: float = 0.0
    flip_slices: bool = False


def draw(settings: Augmentation, seed: int, epoch: int, sample: int) -> Draw:
    """Draw the augmentation of a sample.

    All random numbers are always drawn, so changing one setting does not affect the draws of
    another.
    """
    random = np.random.default_rng([seed, _STREAM, epoch, sample])
    row, col, flip_rows, flip_cols, turns = random.random(5).tolist()
    brightness, contrast, saturation, hue, *stain = random.uniform(-1, 1, 10).tolist()
    sigma, slice0, flip_slices = random.random(3).tolist()
    factors = tuple(1 + settings.stain * x for x in stain[:3])
    added = tuple(settings.stain * x for x in stain[3:])
    return Draw(
        crop=(slice0, row, col) if settings.crop == "random" else None,
        flip_rows=flip_rows < settings.flip,
        flip_cols=flip_cols < settings.flip,
        turns=int(4 * turns) if settings.rotate else 0,
        brightness=1 + settings.brightness * brightness,
        contrast=1 + settings.contrast * contrast,
        saturation=1 + settings.saturation * saturation,
        hue=settings.hue * hue,
        stain=(factors, added) if settings.stain else None,
        sigma=settings.blur * sigma,
        flip_slices=flip_slices < settings.flip,
    )


@dataclass(frozen=True)
class CropWindow:
    """Position of an augmented image in the stored one.

    Its pixel (r, c) is the stored one at `corner` + (r', c'), where (r', c') is (r, c), mirrored
    within `size` as drawn, and then with rows and columns swapped if transposed. For volumes slices
    come first and are never swapped.

    Attributes:
        size: ([D,] H, W) of the augmented image.
        corner: its first pixel in the stored image; may be negative.
        transposed: whether rows and columns are swapped.
        mirrored: whether each dim is mirrored.
    """

    size: tuple[int, ...]
    corner: tuple[int, ...]
    transposed: bool
    mirrored: tuple[bool, ...]

    def source_box(self, box: Box) -> Box:
        """The box of the stored image under a box of this one; may reach beyond its edges."""
        spans = [
            (n - stop, n - start) if mirrored else (start, stop)
            for (start, stop), n, mirrored in zip(pairs(box), self.size, self.mirrored, strict=True)
        ]
        if self.transposed:
            spans[-2:] = spans[:-3:-1]
        moved = zip(spans, self.corner, strict=True)
        return tuple(at + first for span, first in moved for at in span)

    def arrange(self, pixels: Pixels) -> Pixels:
        """Reorder stored pixels ([slices,] rows, cols, ...) of a `source_box`."""
        dims = len(self.size)
        if self.transposed:
            pixels = pixels.swapaxes(dims - 2, dims - 1)
        return pixels[tuple(slice(None, None, -1 if flip else 1) for flip in self.mirrored)]


def window_of(draw: Draw, stored: Sequence[int], size: Sequence[int]) -> CropWindow:
    """Position of the drawn image of `size` in one of size `stored`.

    If the stored image is smaller, it is centred.
    """
    # A quarter turn counterclockwise: swap rows and columns, then mirror top to bottom.
    transposed = draw.turns % 2 == 1
    rows, cols = draw.flip_rows, draw.flip_cols
    if transposed:
        rows, cols = cols, rows
    rows, cols = rows ^ (draw.turns in (1, 2)), cols ^ (draw.turns in (2, 3))
    taken = (*size[:-2], size[-1], size[-2]) if transposed else tuple(size)
    crop = draw.crop or (None, None, None)
    left = (has - wanted for has, wanted in zip(stored, taken, strict=True))
    corner = tuple(map(_begin, crop[-len(size) :], left))
    return CropWindow(tuple(size), corner, transposed, (draw.flip_slices, rows, cols)[-len(size) :])


def _begin(part: float | None, left: int) -> int:
    """First pixel of a crop, with `left` pixels outside it; below 0 if the image is smaller."""
    return left // 2 if part is None or left <= 0 else int(part * (left + 1))


def read_padded(
    read: Callable[[Box], Pixels], stored: Sequence[int], box: Box, empty: Callable[[], Pixels]
) -> Pixels:
    """Read a box that may reach beyond a stored image.

    Args:
        read: reads a non-empty box inside the image.
        stored: ([d,] h, w) of the image.
        empty: creates the box filled with background.
    """
    inside = clipped(box, stored)
    filled = min(extents(inside)) > 0
    if filled and inside == box:
        return read(box)
    pixels = empty()
    if filled:
        cuts = zip(pairs(inside), box[::2], strict=True)
        where = tuple(slice(start - first, stop - first) for (start, stop), first in cuts)
        pixels[where] = read(inside)
    return np.asarray(pixels)


def clipped(box: Box, stored: Sequence[int]) -> Box:
    """The part of a box inside an image; if it is empty, a stop may precede its start."""
    spans = zip(pairs(box), stored, strict=True)
    return tuple(at for (start, stop), n in spans for at in (max(start, 0), min(stop, n)))
