"""Detection of slides with the same image: equal bytes, or the image re-encoded or rescanned.

Grey thumbnails of 64 pixels are compared by their largest correlation over all shifts, quarter
turns and flips (`pairs.py`). Different sections of the same block stay below the threshold.
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
"""Correlation from which two thumbnails count as the same image."""

_ENERGY = 1.25  # largest ratio of the energies of two thumbnails that are compared
_FLAT = 2.0  # standard deviation of grey values, of 255, below which a thumbnail is empty


def look_at(path: Path) -> Look | None:
    """Read the thumbnail of a slide; None if the slide is unreadable or empty."""
    try:
        with Slide(path) as slide:
            thumbnail = slide.thumbnail(max(1.0, max(slide.size) / SIDE))
    except SlideError:
        return None
    return look_of(thumbnail.image, thumbnail.seen)


def look_of(image: npt.NDArray[np.uint8], seen: npt.NDArray[np.bool_]) -> Look | None:
    """Prepare a thumbnail of at most `SIDE` rows and columns; None if it is empty."""
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
    """Find groups of slides with the same image, as indices into `paths`; see `same_pictures`."""
    numbers = {path: number for number, path in enumerate(paths)}
    equal = [[numbers[path] for path in pair] for pair in twins(paths)]
    alike = same_pictures(paths, range(len(paths)), jobs=jobs, progress=progress)
    return equal + [[*pair] for pair in alike]


def same_pictures(
    paths: Sequence[Path], splits: Sequence[Hashable], *, jobs: int = 1, progress: bool = True
) -> list[tuple[int, int]]:
    """Find pairs of slides of different splits with the same image, as indices into `paths`.

    Unreadable slides match no other. If there is only one split, no slide is read.

    Args:
        paths: of the slides.
        splits: of each slide.
        jobs: threads that read and compare slides.
        progress: show a progress bar on a terminal.
    """
    if len(set(splits)) < 2:
        return []
    off = None if progress else True
    with ThreadPoolExecutor(jobs) as pool:
        read = pool.map(look_at, paths)
        looks = [*tqdm(read, "reading", len(paths), unit="slide", disable=off, leave=False)]
    known = [number for number, look in enumerate(looks) if look is not None]
    count = len(known) * (len(known) - 1) // 2
    with tqdm(desc="comparing", total=count, unit="pair", disable=off, leave=False) as bar:
        pairs = correlated_pairs(
            [look for look in looks if look is not None],
            [splits[number] for number in known],
            ALIKE,
            _ENERGY,
            jobs=jobs,
            progress=bar.update,
        )
    return [(known[first], known[second]) for first, second in pairs]
