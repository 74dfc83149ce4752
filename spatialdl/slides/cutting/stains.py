"""Stain normalisation: every slide in the colours of a reference.

Stained tissue absorbs light: its optical density, -log(intensity / 255), is a mixture of those
of two stains (Beer and Lambert). *Macenko* and *Vahadane* find the two stains in a sample of a
slide's pixels, and replace them and their strengths with those of the reference. *Reinhard* moves
mean and spread of the colours to those of the reference, without a model of stains. White stays
white in all of them.

- M. Macenko et al., "A method for normalizing histology slides for quantitative analysis",
  ISBI 2009, section 2.
- A. Vahadane et al., "Structure-preserving color normalization and sparse stain separation for
  histological images", IEEE Transactions on Medical Imaging 35(8), 2016, sections III and IV.
- E. Reinhard et al., "Color transfer between images", IEEE Computer Graphics and Applications
  21(5), 2001, here in CIE Lab.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from skimage.color import lab2rgb, rgb2lab

from spatialdl.errors import SlideError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.floating]
Stains = npt.NDArray[np.float64]  # (2, 3): unit vectors of optical density, hematoxylin first

Method = Literal["macenko", "reinhard", "vahadane"]
METHODS: tuple[Method, ...] = ("macenko", "reinhard", "vahadane")

CLEAR = 0.15  # mean optical density below which a pixel is glass (Macenko's beta)
FEWEST = 100  # pixels of tissue from which colours can be told
_OUTERMOST = 1.0  # percent of angles beyond Macenko's stains (his alpha)
_STRONGEST = 99.0  # percentile of a stain's strength that is matched
_SPARSE = 0.1  # Vahadane's lambda
_ROUNDS = 200
_ROWS = 256  # of a tile at a time

_DENSITY = -np.log(np.maximum(np.arange(256), 1) / 255).astype(np.float32)


@dataclass(frozen=True)
class StainColours:
    """Two stains (2, 3), and how strong they get (2,)."""

    stains: Stains
    strength: npt.NDArray[np.float64]


@dataclass(frozen=True)
class LabColours:
    """Mean and standard deviation (3,) of tissue in CIE Lab."""

    mean: npt.NDArray[np.float64]
    spread: npt.NDArray[np.float64]


Colours = StainColours | LabColours


def colours_of(pixels: Bytes, method: Method) -> Colours:
    """Estimate the colours of a slide from a sample of its pixels, uint8 (pixels, 3).

    Glass among them is left out.

    Raises:
        SlideError: fewer than 100 of the pixels are tissue.
    """
    tissue = pixels[_DENSITY[pixels].mean(-1) >= CLEAR]
    if len(tissue) < FEWEST:
        raise SlideError(
            f"{len(tissue)} of {len(pixels)} pixels looked at are stained, too few to tell the "
            f"colours of the stains; at least {FEWEST} are needed"
        )
    if method == "reinhard":
        lab = rgb2lab(tissue[None])[0]
        return LabColours(lab.mean(0), np.maximum(lab.std(0), 1e-3))
    density = _DENSITY[tissue].astype(np.float64)
    stains = macenko_stains(density)
    if method == "vahadane":
        stains = vahadane_stains(density, stains)
    strength = np.percentile(concentrations(density, stains), _STRONGEST, axis=0)
    return StainColours(stains, np.maximum(strength, 1e-3))


def recoloured(image: Bytes, own: Colours, reference: Colours) -> Bytes:
    """An image, uint8 (rows, cols, 3), of a slide with colours `own` in those of the reference.

    Raises:
        TypeError: the two were estimated by methods that do not go together.
    """
    result = np.empty_like(image)
    for row in range(0, len(image), _ROWS):
        part = image[row : row + _ROWS]
        if isinstance(own, StainColours) and isinstance(reference, StainColours):
            result[row : row + _ROWS] = _restained(part, own, reference)
        elif isinstance(own, LabColours) and isinstance(reference, LabColours):
            result[row : row + _ROWS] = _moved(part, own, reference)
        else:
            raise TypeError(f"{own} cannot be brought to {reference}")
    return result


def _restained(image: Bytes, own: StainColours, reference: StainColours) -> Bytes:
    """Take an image apart into its stains, and put it together with the reference's."""
    density = _DENSITY[image]
    amounts = concentrations(density.reshape(-1, 3), own.stains)
    target = (reference.strength / own.strength)[:, None] * reference.stains
    light = 255 * np.exp(-amounts @ target.astype(np.float32))
    return np.asarray(np.rint(light), np.uint8).reshape(image.shape)


def _moved(image: Bytes, own: LabColours, reference: LabColours) -> Bytes:
    """Move mean and spread; glass is left as it is, and what is nearly glass nearly so."""
    lab = (rgb2lab(image) - own.mean) * (reference.spread / own.spread) + reference.mean
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Conversion from CIE-LAB")  # out of gamut: cut off
        moved = 255 * np.clip(lab2rgb(lab), 0, 1)
    weight = np.clip(_DENSITY[image].mean(-1, keepdims=True) / CLEAR, 0, 1)
    return np.asarray(np.rint(weight * moved + (1 - weight) * image), np.uint8)


def macenko_stains(density: Floats) -> Stains:
    """The outermost directions of optical densities (pixels, 3) in the plane that fits them."""
    _, vectors = np.linalg.eigh(np.cov(density.T))
    plane = vectors[:, :0:-1]  # of the two largest eigenvalues, the largest first
    plane = plane * np.where(plane.sum(0) < 0, -1, 1)
    across, along = plane[:, 1], plane[:, 0]
    angles = np.arctan2(density @ across, density @ along)
    low, high = np.percentile(angles, [_OUTERMOST, 100 - _OUTERMOST])
    return _in_order(np.stack([np.cos(a) * along + np.sin(a) * across for a in (low, high)]))


def vahadane_stains(density: Floats, start: Stains) -> Stains:
    """Non-negative stains that explain optical densities (pixels, 3) by few of them at a time.

    Minimises ||density - amounts @ stains||^2 / 2 + lambda * sum(amounts), both non-negative,
    stains of length 1, by turns from `start`: amounts exactly, stains one after the other.
    """
    stains = start
    for _ in range(_ROUNDS):
        amounts = concentrations(density, stains, _SPARSE)
        known, seen = amounts.T @ amounts, amounts.T @ density
        before, stains = stains, stains.copy()
        for k in range(2):
            if known[k, k] > 0:
                change = (seen[k] - known[k] @ stains) / known[k, k]
                stains[k] = np.maximum(stains[k] + change, 0)
                stains[k] /= max(float(np.linalg.norm(stains[k])), 1e-9)
        if np.abs(stains - before).max() < 1e-6:
            break
    return _in_order(stains)


def concentrations(density: Floats, stains: Stains, penalty: float = 0.0) -> Floats:
    """How much of each stain explains optical densities (pixels, 3) best: (pixels, 2), none < 0.

    Exact: with two stains the best is that of both, or of one alone.
    """
    gram = stains @ stains.T
    matched = density @ stains.T.astype(density.dtype) - density.dtype.type(penalty)
    both = matched @ np.linalg.pinv(gram).astype(density.dtype)
    alone = np.maximum(matched, 0) / np.diag(gram).astype(density.dtype)
    # what one alone explains grows with the square of its match
    alone *= np.argmax(alone * np.maximum(matched, 0), -1)[:, None] == np.arange(2)
    return np.where((both >= 0).all(-1, keepdims=True), both, alone)


def _in_order(stains: Stains) -> Stains:
    """Hematoxylin first: it is the one that absorbs more red."""
    stains = np.maximum(stains, 0)
    stains /= np.maximum(np.linalg.norm(stains, axis=1, keepdims=True), 1e-9)
    return stains[np.argsort(-stains[:, 0])]
