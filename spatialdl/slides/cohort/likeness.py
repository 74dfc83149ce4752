"""Slides that show the same: of the same bytes, or the same picture scanned or stored again.

Pictures of 64 pixels are compared in grey, by the largest correlation over all shifts, quarter
turns and flips. Other sections of the same block stay below the bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from spatialdl.errors import SlideError
from spatialdl.slides.batch.duplicates import twins
from spatialdl.slides.reading.reader import Slide

SIDE = 64
"""Rows or columns of the pictures that are compared."""

ALIKE = 0.9
"""Correlation from which two pictures show the same."""

_ENERGY = 1.25  # of two pictures, at most so many times as much in one as in the other
_FLAT = 2.0  # standard deviation, of 255, below which there is nothing to compare

Spectrum = npt.NDArray[np.complex64]


@dataclass(frozen=True)
class Look:
    """A slide as it is compared.

    Attributes:
        energy: standard deviation of its grey values.
        spectra: of the picture turned and flipped in eight ways, each of norm 1.
    """

    energy: float
    spectra: Spectrum


def look_at(path: Path) -> Look | None:
    """A slide's small picture; None where it cannot be read, or shows nothing."""
    try:
        with Slide(path) as slide:
            thumbnail = slide.thumbnail(max(1.0, max(slide.size) / SIDE))
    except SlideError:
        return None
    return look_of(thumbnail.image, thumbnail.seen)


def look_of(image: npt.NDArray[np.uint8], seen: npt.NDArray[np.bool_]) -> Look | None:
    """The look of a picture of at most `SIDE` rows and columns; None where it shows nothing."""
    grey = image.astype(np.float32).mean(-1)
    if not seen.any():
        return None
    grey = np.where(seen, grey - np.median(grey[seen]), 0.0)
    energy = float(grey.std())
    if energy < _FLAT:
        return None
    square = np.zeros((SIDE + 1, SIDE + 1), np.float32)
    square[: grey.shape[0], : grey.shape[1]] = grey
    ways = [np.rot90(one, turns) for one in (square, square.T) for turns in range(4)]
    spectra = np.fft.rfft2(np.stack(ways), (2 * SIDE, 2 * SIDE)).astype(np.complex64)
    return Look(energy, spectra / np.float32(np.linalg.norm(square)))


def correlation(one: Look, other: Look) -> float:
    """The largest over all shifts, quarter turns and flips, -1 to 1."""
    products = one.spectra[:1].conj() * other.spectra
    return float(np.fft.irfft2(products, (2 * SIDE, 2 * SIDE)).max())


def same_slides(paths: Sequence[Path], *, progress: bool = True) -> list[list[int]]:
    """Groups of slides that show the same, by their numbers in `paths`."""
    numbers = {path: number for number, path in enumerate(paths)}
    found = [[numbers[one], numbers[other]] for one, other in twins(paths)]
    return found + [[*pair] for pair in same_pictures(paths, range(len(paths)), progress=progress)]


def same_pictures(
    paths: Sequence[Path], splits: Sequence[Hashable], *, jobs: int = 1, progress: bool = True
) -> list[tuple[int, int]]:
    """Pairs of slides of different splits that show the same picture, by their numbers in `paths`.

    Slides that cannot be read are like none. Where all are in one split, none is read.

    Args:
        paths: of the slides.
        splits: of each.
        jobs: threads that read slides.
        progress: show a bar, if the console is one.
    """
    if len(set(splits)) < 2:
        return []
    off = None if progress else True
    with ThreadPoolExecutor(jobs) as pool:
        read = pool.map(look_at, paths)
        looks = [*tqdm(read, "looking", len(paths), unit="slide", disable=off, leave=False)]
    known = [(number, look) for number, look in enumerate(looks) if look is not None]
    count = len(known) * (len(known) - 1) // 2
    return [
        (number, other_number)
        for (number, one), (other_number, other) in tqdm(
            combinations(known, 2), "comparing", count, unit="pair", disable=off, leave=False
        )
        if splits[number] != splits[other_number] and _alike(one, other)
    ]


def _alike(one: Look, other: Look) -> bool:
    low, high = sorted((one.energy, other.energy))
    return high <= _ENERGY * low and correlation(one, other) >= ALIKE
