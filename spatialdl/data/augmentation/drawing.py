"""Random draws per sample and epoch, the same in every layout, rank and process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spatialdl.data.augmentation.settings import Augmentation

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
