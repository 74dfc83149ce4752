"""Slides that show the same: of the same bytes, or the same picture scanned or stored again.

Pictures of 64 pixels are compared in grey, by the largest correlation over all shifts, quarter
turns and flips (`pairs.py`). Other sections of the same block stay below the bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from spatialdl.errors import SlideError
from spatialdl.slides.batch.duplicates import twins
from spatialdl.slides.cohort.pairs import SIDE, Look, correlated_pairs
from spatialdl.slides.reading.reader import Slide

ALIKE = 0.9
"""Correlation from which two pictures show the same."""

_ENERGY = 1.25  # of two pictures, at most so many times as much in one as in the other
_FLAT = 2.0  # standard deviation, of 255, below which there is nothing to compare


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
    return Look(energy, square / np.float32(np.linalg.norm(square)))


def same_slides(paths: Sequence[Path], *, jobs: int = 1, progress: bool = True) -> list[list[int]]:
    """Groups of slides that show the same, by their numbers in `paths`; see `same_pictures`."""
    numbers = {path: number for number, path in enumerate(paths)}
    found = [[numbers[one], numbers[other]] for one, other in twins(paths)]
    alike = same_pictures(paths, range(len(paths)), jobs=jobs, progress=progress)
    return found + [[*pair] for pair in alike]


def same_pictures(
    paths: Sequence[Path], splits: Sequence[Hashable], *, jobs: int = 1, progress: bool = True
) -> list[tuple[int, int]]:
    """Pairs of slides of different splits that show the same picture, by their numbers in `paths`.

    Slides that cannot be read are like none. Where all are in one split, none is read.

    Args:
        paths: of the slides.
        splits: of each.
        jobs: threads that read slides and compare them.
        progress: show a bar, if the console is one.
    """
    if len(set(splits)) < 2:
        return []
    off = None if progress else True
    with ThreadPoolExecutor(jobs) as pool:
        read = pool.map(look_at, paths)
        looks = [*tqdm(read, "looking", len(paths), unit="slide", disable=off, leave=False)]
    known = [number for number, look in enumerate(looks) if look is not None]
    count = len(known) * (len(known) - 1) // 2
    with tqdm(desc="comparing", total=count, unit="pair", disable=off, leave=False) as bar:
        found = correlated_pairs(
            [look for look in looks if look is not None],
            [splits[number] for number in known],
            ALIKE,
            _ENERGY,
            jobs=jobs,
            progress=bar.update,
        )
    return [(known[one], known[other]) for one, other in found]
