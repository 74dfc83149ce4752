"""Stain normalisation: reference colours, colours of a slide, and the methods.

Stained tissue absorbs light: its optical density, -log(intensity / 255), is a linear mixture of
those of two stains (Beer and Lambert). *Macenko* and *Vahadane* estimate the two stains from a
sample of a slide's pixels, and replace them and their strengths by those of the reference.
*Reinhard* matches mean and standard deviation of the colours, without a model of stains. All of
them leave white unchanged.

- M. Macenko et al., "A method for normalizing histology slides for quantitative analysis",
  ISBI 2009, section 2.
- A. Vahadane et al., "Structure-preserving color normalization and sparse stain separation for
  histological images", IEEE Transactions on Medical Imaging 35(8), 2016, sections III and IV.
- E. Reinhard et al., "Color transfer between images", IEEE Computer Graphics and Applications
  21(5), 2001, here in CIE Lab.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image
from skimage.color import lab2rgb, rgb2lab

from spatialdl.errors import SlideError
from spatialdl.slides.cutting.tiling import TilePlan
from spatialdl.slides.reading.reader import Slide

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.floating]
Stains = npt.NDArray[np.float64]  # (2, 3): unit vectors of optical density, hematoxylin first

Method = Literal["macenko", "reinhard", "vahadane"]
METHODS: tuple[Method, ...] = ("macenko", "reinhard", "vahadane")

CLEAR = 0.15  # mean optical density below which a pixel is glass (Macenko's beta)
FEWEST = 100  # pixels of tissue needed to estimate colours
_OUTERMOST = 1.0  # percent of angles beyond Macenko's stains (his alpha)
_STRONGEST = 99.0  # percentile of a stain's strength that is matched
_SPARSE = 0.1  # Vahadane's lambda
_ROUNDS = 200
_ROWS = 256  # rows of a tile processed at a time

_DENSITY = -np.log(np.maximum(np.arange(256), 1) / 255).astype(np.float32)


@dataclass(frozen=True)
class StainColours:
    """Two stains (2, 3) and their strengths (2,), the 99th percentiles."""

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

    Glass is excluded.

    Raises:
        SlideError: fewer than 100 of the pixels are tissue.
    """
    tissue = pixels[_DENSITY[pixels].mean(-1) >= CLEAR]
    if len(tissue) < FEWEST:
        raise SlideError(
            f"{len(tissue)} of {len(pixels)} sampled pixels are stained, too few to estimate the "
            f"stains; at least {FEWEST} are needed"
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
    """Convert an image, uint8 (rows, cols, 3), from colours `own` to those of the reference.

    Raises:
        TypeError: the two colours were estimated by incompatible methods.
    """
    result = np.empty_like(image)
    for row in range(0, len(image), _ROWS):
        part = image[row : row + _ROWS]
        if isinstance(own, StainColours) and isinstance(reference, StainColours):
            result[row : row + _ROWS] = _restained(part, own, reference)
        elif isinstance(own, LabColours) and isinstance(reference, LabColours):
            result[row : row + _ROWS] = _moved(part, own, reference)
        else:
            raise TypeError(f"cannot convert colours {own} to {reference}")
    return result


def _restained(image: Bytes, own: StainColours, reference: StainColours) -> Bytes:
    """Separate an image into its stains, and recombine them with those of the reference."""
    density = _DENSITY[image]
    amounts = concentrations(density.reshape(-1, 3), own.stains)
    target = (reference.strength / own.strength)[:, None] * reference.stains
    light = 255 * np.exp(-amounts @ target.astype(np.float32))
    return np.asarray(np.rint(light), np.uint8).reshape(image.shape)


def _moved(image: Bytes, own: LabColours, reference: LabColours) -> Bytes:
    """Match mean and standard deviation; the change fades out towards glass."""
    lab = (rgb2lab(image) - own.mean) * (reference.spread / own.spread) + reference.mean
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Conversion from CIE-LAB")  # out of gamut: clipped
        moved = 255 * np.clip(lab2rgb(lab), 0, 1)
    weight = np.clip(_DENSITY[image].mean(-1, keepdims=True) / CLEAR, 0, 1)
    return np.asarray(np.rint(weight * moved + (1 - weight) * image), np.uint8)


def macenko_stains(density: Floats) -> Stains:
    """Estimate stains as the extreme directions of densities (pixels, 3) in their main plane."""
    _, vectors = np.linalg.eigh(np.cov(density.T))
    plane = vectors[:, :0:-1]  # eigenvectors of the two largest eigenvalues, largest first
    plane = plane * np.where(plane.sum(0) < 0, -1, 1)
    across, along = plane[:, 1], plane[:, 0]
    angles = np.arctan2(density @ across, density @ along)
    low, high = np.percentile(angles, [_OUTERMOST, 100 - _OUTERMOST])
    return _in_order(np.stack([np.cos(a) * along + np.sin(a) * across for a in (low, high)]))


def vahadane_stains(density: Floats, start: Stains) -> Stains:
    """Estimate stains by sparse non-negative factorisation of optical densities (pixels, 3).

    Minimises ||density - amounts @ stains||^2 / 2 + lambda * sum(amounts), both non-negative,
    stains of norm 1, alternately from `start`: amounts exactly, stains one after the other.
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
    """Fit non-negative amounts of two stains to optical densities (pixels, 3): (pixels, 2).

    Exact: with two stains the optimum uses both, or one alone.
    """
    gram = stains @ stains.T
    matched = density @ stains.T.astype(density.dtype) - density.dtype.type(penalty)
    both = matched @ np.linalg.pinv(gram).astype(density.dtype)
    alone = np.maximum(matched, 0) / np.diag(gram).astype(density.dtype)
    # the stain with the larger reduction of the error, which is amount times match
    alone *= np.argmax(alone * np.maximum(matched, 0), -1)[:, None] == np.arange(2)
    return np.where((both >= 0).all(-1, keepdims=True), both, alone)


def _in_order(stains: Stains) -> Stains:
    """Normalise stains and sort them: hematoxylin, which absorbs more red, comes first."""
    stains = np.maximum(stains, 0)
    stains /= np.maximum(np.linalg.norm(stains, axis=1, keepdims=True), 1e-9)
    return stains[np.argsort(-stains[:, 0])]


_TILES = 24  # sampled per slide
_PIXELS = 4096  # sampled per tile
_GOLDEN = (5**0.5 - 1) / 2

# Hematoxylin and eosin of typical strength: the reference in M. Veta's implementation of
# Macenko et al., github.com/mitkovetta/staining-normalization (HERef, maxCRef)
_STAINS = StainColours(
    np.array([[0.5626, 0.7201, 0.4062], [0.2159, 0.8012, 0.5581]]), np.array([1.9705, 1.0308])
)
# the colours of CMU-1-Small-Region.svs of OpenSlide's test data (CC0), normalised to these stains
_COLOURS = LabColours(np.array([63.50, 21.44, -11.09]), np.array([15.19, 5.16, 4.57]))
BUILT_IN: Mapping[Method, Colours] = {
    "macenko": _STAINS,
    "reinhard": _COLOURS,
    "vahadane": _STAINS,
}


def reference_colours(method: Method, image: Path | None) -> Colours:
    """Return the target colours: those of an image file, or the built-in ones.

    Raises:
        ValueError: the file is not an image, or has too little stained tissue.
    """
    if image is None:
        return BUILT_IN[method]
    try:
        with Image.open(image) as opened:
            pixels = np.asarray(opened.convert("RGB")).reshape(-1, 3)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot read stain reference {image}: {error}") from error
    try:
        return colours_of(_spread(pixels, _TILES * _PIXELS), method)
    except SlideError as error:
        raise ValueError(f"stain reference {image} cannot be used: {error}") from error


def own_colours(
    slide: Slide, plan: TilePlan, method: Method, refused: Callable[[Bytes], object]
) -> Colours:
    """Estimate the colours of a slide.

    Args:
        slide: an open slide.
        plan: its tiles.
        method: "macenko", "reinhard" or "vahadane".
        refused: true for tiles to exclude, such as those with ink.

    Raises:
        SlideError: too little stained tissue.
    """
    try:
        return colours_of(sampled(slide, plan, refused), method)
    except SlideError as error:
        raise SlideError(f"cannot normalise the stains of slide {slide.path}: {error}") from error


def sampled(slide: Slide, plan: TilePlan, refused: Callable[[Bytes], object]) -> Bytes:
    """Sample pixels (pixels, 3) of up to 24 evenly spread tiles of a plan, deterministically.

    Refused and damaged tiles are replaced by other tiles.
    """
    parts = [np.empty((0, 3), np.uint8)]
    # steps of the golden ratio: any number of them is evenly spread
    for number in np.argsort(np.arange(len(plan.places)) * _GOLDEN % 1):
        x, y = plan.places[number]
        try:
            image = slide.read_scaled(x, y, (plan.tile_size, plan.tile_size), plan.scale)
        except SlideError:
            continue  # reported when the tile is cut
        if not refused(image):
            parts.append(_spread(image.reshape(-1, 3), _PIXELS))
        if len(parts) > _TILES:
            break
    return np.concatenate(parts)


def _spread(pixels: Bytes, count: int) -> Bytes:
    # an odd step, since a divisor of the width would sample only some columns
    return pixels[:: max(1, len(pixels) // count) | 1]
