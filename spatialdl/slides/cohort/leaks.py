"""Detection of leaks between splits: slides of one patient, or with the same image.

Images are the same with equal bytes, or re-encoded or rescanned: grey thumbnails of 64 pixels are
compared by their largest correlation over all shifts, quarter turns and flips. Different sections
of the same block stay below the threshold.

At one shift the correlation of pictures with spectra A and B is the mean over frequencies k of
conj(A_k) B_k times a phase; over all shifts it is at most the mean of |A_k| |B_k|. A matrix product
computes this upper bound for many pairs at once, and nearly all are below the threshold. Only the
other pairs are correlated. The search is exact: no pair is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import fft

from spatialdl.common.text import progress_bar
from spatialdl.data.tables import read_table
from spatialdl.errors import SlideError
from spatialdl.slides.batch.finding_slides import SlideLabel, slide_names
from spatialdl.slides.batch.record import SlideRecord, names_in, slide_content, slide_sources
from spatialdl.slides.reading.paths import slide_bytes
from spatialdl.slides.reading.reader import Slide


def check_patients(table: Path) -> None:
    """Check that no patient is in two splits, if a table has a column patient.

    Raises:
        ValueError: a patient is in two splits, or the table cannot be read.
    """
    read_table(table).check_patients(", or pass --allow-leaks")


def check_duplicates(
    slides: Sequence[Path],
    labels: Mapping[Path, SlideLabel],
    before: Path | None,
    *,
    allowed: bool = False,
) -> list[str]:
    """Search for slides with equal contents, within a run and between it and an earlier batch.

    Only slides of the same length are read.

    Args:
        slides: of this run.
        labels: of the slides, may be empty.
        before: the data set that they are added to.
        allowed: accept duplicates in different splits.

    Returns:
        A warning for each pair of duplicates.

    Raises:
        ValueError: duplicates are in different splits.
    """
    splits = {slide: label.split for slide, label in labels.items()}
    pairs = [(str(k), splits.get(k), str(other), splits.get(other)) for k, other in twins(slides)]
    names = slide_names(slides)
    lengths: dict[str, list[Path]] = {}
    for slide in slides:
        lengths.setdefault(str(slide_bytes(slide)), []).append(slide)
    for name, record in _other_records(before, slides).items():
        for slide in lengths.get(record.content.partition("-")[0], []):
            if names[slide] != name and slide_content(slide) == record.content:
                known = f"slide {name} of the data set"
                pairs.append((known, record.split, str(slide), splits.get(slide)))
    leaks = [f"{k} ({split}) and {other} ({its})" for k, split, other, its in pairs if split != its]
    if leaks and not allowed:
        raise ValueError(
            f"the same slide is in different splits: {'; '.join(leaks)}; remove one of the two, "
            "assign both to the same split, or pass --allow-leaks"
        )
    return [
        f"{k} and {other} are the same slide; its tiles count twice" for k, _, other, _ in pairs
    ]


def check_pictures(
    labels: Mapping[Path, SlideLabel], before: Path | None = None, *, jobs: int = 1
) -> None:
    """Check that no two slides of different splits have the same image, re-encoded or rescanned.

    Args:
        labels: of the slides to cut.
        before: the data set that they are added to; its other slides are compared, too, if
            their files still exist.
        jobs: threads that read slides.

    Raises:
        ValueError: such slides exist.
    """
    splits = {slide: label.split for slide, label in labels.items()}
    for record in _other_records(before, [*labels]).values():
        if record.split is not None and Path(record.source).exists():
            splits[Path(record.source)] = record.split
    slides = list(splits)
    pairs = same_pictures(slides, list(splits.values()), jobs=jobs)
    leaks = [" and ".join(f"{slides[k]} ({splits[slides[k]]})" for k in pair) for pair in pairs]
    if leaks:
        raise ValueError(
            f"slides in different splits have the same image: {'; '.join(leaks)}; assign both to "
            "the same split (spatialdl-split --slides does), remove one of the two, or pass "
            "--allow-leaks"
        )


def _other_records(before: Path | None, slides: Sequence[Path]) -> dict[str, SlideRecord]:
    """Records of an earlier batch, by name, without those of some slides."""
    if before is None:
        return {}
    sources = {source for slide in slides for source in slide_sources(slide)}
    records = {name: SlideRecord.load(before, name) for name in names_in(before)}
    return {name: k for name, k in records.items() if k is not None and k.source not in sources}


ALIKE = 0.9
"""Correlation from which two thumbnails count as the same image."""
SIDE = 64
"""Largest number of rows or columns of a thumbnail."""

_ENERGY = 1.25  # largest ratio of the energies of two thumbnails that are compared
_FLAT = 2.0  # standard deviation of grey values, of 255, below which a thumbnail is empty
_BATCH = 64  # correlations in memory at a time
_SLACK = 1e-3  # tolerance for bounds in float32, larger than their rounding errors
# of a real picture |A_k| = |A_-k|: a half turn, at index + 2, changes no magnitude
_DIFFERENT = [0, 1, 4, 5]

Spectra = npt.NDArray[np.complex64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Look:
    """A thumbnail prepared for comparison.

    Attributes:
        energy: standard deviation of its grey values.
        square: (SIDE + 1, SIDE + 1), of norm 1; 0 outside of the picture.
    """

    energy: float
    square: Floats

    @property
    def spectra(self) -> Spectra:
        """(8, 2 * SIDE, SIDE + 1): spectra in all eight orientations, by turns and flips."""
        ways = [np.rot90(one, turns) for one in (self.square, self.square.T) for turns in range(4)]
        return _spectra(np.stack(ways))


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


def twins(slides: Sequence[Path]) -> list[tuple[Path, Path]]:
    """List pairs of slides with equal contents; only slides of the same length are read."""
    lengths: dict[int, list[Path]] = {}
    for slide in slides:
        lengths.setdefault(slide_bytes(slide), []).append(slide)
    contents: dict[str, list[Path]] = {}
    for group in lengths.values():
        for slide in group if len(group) > 1 else []:
            contents.setdefault(slide_content(slide), []).append(slide)
    return [pair for group in contents.values() for pair in pairwise(group) if _same_hash(*pair)]


def _same_hash(first: Path, second: Path) -> bool:
    """Whether openslide's hashes are equal, which cover the companion files of a slide, too."""
    try:
        with Slide(first) as slide, Slide(second) as other:
            return slide.quickhash == other.quickhash
    except SlideError:
        return False  # the report has the error


def same_slides(paths: Sequence[Path], *, jobs: int = 1) -> list[list[int]]:
    """Find groups of slides with the same image, as indices into `paths`; see `same_pictures`."""
    numbers = {path: number for number, path in enumerate(paths)}
    equal = [[numbers[path] for path in pair] for pair in twins(paths)]
    alike = same_pictures(paths, range(len(paths)), jobs=jobs)
    return equal + [[*pair] for pair in alike]


def same_pictures(
    paths: Sequence[Path], splits: Sequence[Hashable], *, jobs: int = 1
) -> list[tuple[int, int]]:
    """Find pairs of slides of different splits with the same image, as indices into `paths`.

    Unreadable slides match no other. If there is only one split, no slide is read.

    Args:
        paths: of the slides.
        splits: of each slide.
        jobs: threads that read and compare slides.
    """
    if len(set(splits)) < 2:
        return []
    with ThreadPoolExecutor(jobs) as pool:
        read = pool.map(look_at, paths)
        looks = [*progress_bar(read, "reading", "slide", total=len(paths))]
    known = {number: look for number, look in enumerate(looks) if look is not None}
    kinds = [splits[number] for number in known]
    count = len(known) * (len(known) - 1) // 2
    with progress_bar(None, "comparing", "pair", total=count) as bar:
        pairs = correlated_pairs(
            [*known.values()], kinds, ALIKE, _ENERGY, jobs=jobs, progress=bar.update
        )
    numbers = [*known]
    return [(numbers[first], numbers[second]) for first, second in pairs]


def correlation(one: Look, other: Look) -> float:
    """Return the largest correlation over all shifts, quarter turns and flips, -1 to 1."""
    return float(_largest([one.square], other.spectra)[0])


def correlated_pairs(
    looks: Sequence[Look],
    kinds: Sequence[Hashable],
    least: float,
    energy: float,
    *,
    jobs: int = 1,
    progress: Callable[[int], object] = lambda pairs: None,
) -> list[tuple[int, int]]:
    """Find all correlated pairs of looks of different kinds, as sorted indices.

    Args:
        looks: thumbnails.
        kinds: of each look; looks of the same kind are not compared.
        least: smallest correlation of a pair.
        energy: largest ratio of the energies of a pair.
        jobs: threads.
        progress: called with the number of pairs compared since the last call.
    """
    codes = {kind: code for code, kind in enumerate(dict.fromkeys(kinds))}
    kind_codes = np.array([codes[kind] for kind in kinds])
    energies = np.array([look.energy for look in looks])
    magnitudes = np.array([_magnitudes(_spectra(look.square[None]))[0] for look in looks])
    pairs: list[tuple[int, int]] = []
    for number, look in enumerate(looks):
        first = number + 1
        ratios = energies[first:] / look.energy
        wanted = (kind_codes[first:] != kind_codes[number]) & (ratios <= energy)
        wanted &= ratios * energy >= 1
        if wanted.any():
            ways = look.spectra
            bounds = _magnitudes(ways[_DIFFERENT]) @ magnitudes[first:].T
            for way, row in zip(_DIFFERENT, (bounds >= least - _SLACK) & wanted, strict=True):
                some = np.flatnonzero(row) + first
                squares = [looks[other].square for other in some.tolist()]
                values = _largest(squares, ways[[way, way + 2]], jobs)
                pairs += [(number, other) for other in some[values >= least].tolist()]
        progress(len(wanted))
    return sorted(set(pairs))


def _spectra(squares: Floats) -> Spectra:
    return np.asarray(fft.rfft2(squares, (2 * SIDE, 2 * SIDE)), np.complex64)


def _magnitudes(spectra: Spectra) -> Floats:
    """(N, frequencies): of a half spectrum; all but its edge columns stand for two frequencies."""
    twice = np.full(SIDE + 1, np.sqrt(2), np.float32)
    twice[[0, -1]] = 1
    scaled = np.abs(spectra) * (twice / (2 * SIDE))
    return np.asarray(scaled.reshape(len(spectra), -1), np.float32)


def _largest(squares: Sequence[Floats], ways: Spectra, jobs: int = 1) -> Floats:
    """(N,): largest correlations of N pictures with another in some orientations and all shifts."""
    largest = np.empty(len(squares), np.float32)
    for first in range(0, len(squares), _BATCH):
        products = _spectra(np.stack(squares[first : first + _BATCH]))[:, None].conj() * ways
        shifts = fft.irfft2(products, (2 * SIDE, 2 * SIDE), overwrite_x=True, workers=jobs)
        largest[first : first + _BATCH] = shifts.max((1, 2, 3))
    return largest


def pairs_apart(alike: Sequence[Sequence[int]], splits: Sequence[str]) -> list[tuple[int, int]]:
    """Return pairs of slides of the same group in different splits."""
    return [
        (first, second)
        for group in alike
        for first, second in combinations(group, 2)
        if splits[first] != splits[second]
    ]
