"""Search for correlated pairs among thousands of pictures, without correlating all pairs.

At one shift the correlation of pictures with spectra A and B is the mean over frequencies k of
conj(A_k) B_k times a phase; over all shifts it is at most the mean of |A_k| |B_k|. A matrix product
computes this upper bound for many pairs at once, and nearly all are below the threshold. Only the
other pairs are correlated. The search is exact: no pair is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import fft

SIDE = 64
"""Largest number of rows or columns of a picture."""

_BLOCK = 256  # pictures on each side of a block of pairs
_BATCH = 64  # correlations in memory at a time
_SLACK = 1e-3  # tolerance for bounds in float32, larger than their rounding errors

Spectra = npt.NDArray[np.complex64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


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


def _spectra(squares: Floats) -> Spectra:
    return np.asarray(fft.rfft2(squares, (2 * SIDE, 2 * SIDE)), np.complex64)


def correlation(one: Look, other: Look) -> float:
    """Return the largest correlation over all shifts, quarter turns and flips, -1 to 1."""
    return float(_largest(one.spectra[:1], other.spectra)[0])


def _largest(plain: Spectra, ways: Spectra, jobs: int = 1) -> Floats:
    """(N,): largest correlations of N pictures with another in some orientations and all shifts."""
    largest = []
    for first in range(0, len(plain), _BATCH):
        products = plain[first : first + _BATCH, None].conj() * ways
        shifts = fft.irfft2(products, (2 * SIDE, 2 * SIDE), overwrite_x=True, workers=jobs)
        largest.append(shifts.max((1, 2, 3)))
    return np.concatenate(largest)


class _Block:
    """A block of thumbnails, with cached spectra.

    Args:
        numbers: indices of these thumbnails among all.
        looks: the thumbnails.
    """

    # of a real picture |A_k| = |A_-k|: a half turn changes no magnitude
    _DIFFERENT = (0, 1, 4, 5)  # the half turn of an orientation is at its index + 2

    def __init__(self, numbers: npt.NDArray[np.int64], looks: Sequence[Look]) -> None:
        self.numbers, self.looks = numbers, looks
        self.energies = np.array([look.energy for look in looks])

    @cached_property
    def plain(self) -> Spectra:
        """(looks, 2 * SIDE, SIDE + 1): spectra in the original orientation."""
        return _spectra(np.stack([look.square for look in self.looks]))

    @cached_property
    def turned(self) -> Spectra:
        """(8, looks, 2 * SIDE, SIDE + 1): spectra in all orientations."""
        return np.stack([look.spectra for look in self.looks], 1)

    @cached_property
    def magnitudes(self) -> Floats:
        """(4, looks, frequencies): in the orientations in which they differ; rows of norm 1."""
        return np.stack([_magnitudes(self.turned[way]) for way in self._DIFFERENT])

    def bounds(self, other: _Block) -> Floats:
        """(4, own looks, looks of other): upper bounds of correlations, by orientation."""
        flat = self.magnitudes.reshape(-1, self.magnitudes.shape[-1])
        bounds = flat @ _magnitudes(other.plain).T  # one product of matrices is the fastest
        return bounds.reshape(len(self._DIFFERENT), len(self.looks), -1)

    def correlate(self, other: _Block, wanted: Bools, jobs: int) -> npt.NDArray[np.float64]:
        """(own looks, looks of other): largest correlation, -1 where none is wanted.

        Args:
            wanted: (4, own looks, looks of other), by orientation.
        """
        largest = np.full(wanted.shape[1:], -1.0)
        for number, row in np.argwhere(wanted.any(2)).tolist():
            way, some = self._DIFFERENT[number], np.flatnonzero(wanted[number, row])
            values = _largest(other.plain[some], self.turned[[way, way + 2], row], jobs)
            largest[row, some] = np.maximum(largest[row, some], values)
        return largest


def _magnitudes(spectra: Spectra) -> Floats:
    """(N, frequencies): of a half spectrum; all but its edge columns stand for two frequencies."""
    twice = np.full(SIDE + 1, np.sqrt(2), np.float32)
    twice[[0, -1]] = 1
    scaled = np.abs(spectra) * (twice / (2 * SIDE))
    return np.asarray(scaled.reshape(len(spectra), -1), np.float32)


def correlated_pairs(
    looks: Sequence[Look],
    kinds: Sequence[Hashable],
    least: float,
    energy: float,
    *,
    jobs: int = 1,
    progress: Callable[[int], object] | None = None,
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
    kind_codes = np.array([codes[kind] for kind in kinds], np.int64)
    pairs: list[tuple[int, int]] = []
    for block, other in _block_pairs(looks):
        wanted = _allowed(block, other, kind_codes, energy)
        if wanted.any():
            candidates = (block.bounds(other) >= least - _SLACK) & wanted
            rows, columns = np.nonzero(block.correlate(other, candidates, jobs) >= least)
            numbers = block.numbers[rows].tolist(), other.numbers[columns].tolist()
            pairs += [(min(pair), max(pair)) for pair in zip(*numbers, strict=True)]
        if progress is not None:
            count = len(block.looks)
            progress(count * (count - 1) // 2 if block is other else count * len(other.looks))
    return sorted(pairs)


def _block_pairs(looks: Sequence[Look]) -> Iterator[tuple[_Block, _Block]]:
    """All pairs of blocks, each block with itself included, sorted by energy."""
    order = np.argsort([look.energy for look in looks], kind="stable")
    parts = [order[first : first + _BLOCK] for first in range(0, len(order), _BLOCK)]
    for place, part in enumerate(parts):
        block = _Block(part, [looks[number] for number in part.tolist()])
        yield block, block
        for later in parts[place + 1 :]:
            yield block, _Block(later, [looks[number] for number in later.tolist()])


def _allowed(block: _Block, other: _Block, kinds: npt.NDArray[np.int64], energy: float) -> Bools:
    """(looks of block, looks of other): pairs of different kinds and similar energy."""
    allowed = kinds[block.numbers][:, None] != kinds[other.numbers][None]
    allowed &= other.energies[None] <= energy * block.energies[:, None]
    allowed &= block.energies[:, None] <= energy * other.energies[None]
    if block is other:
        allowed &= np.triu(np.ones_like(allowed), 1)
    return np.asarray(allowed)
