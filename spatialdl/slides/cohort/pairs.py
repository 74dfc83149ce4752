"""Pairs of pictures that correlate, among thousands, without correlating all of them.

At one shift the correlation of pictures with spectra A and B is the mean over frequencies k of
conj(A_k) B_k times a phase; over all shifts it is at most the mean of |A_k| |B_k|. This bound is a
product of matrices for many pairs at once, and nearly all stay below what is looked for. The rest
is correlated. No pair is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import fft

SIDE = 64
"""Rows or columns of the pictures that are compared."""

_BLOCK = 256  # pictures on each side of a block of pairs
_BATCH = 64  # correlations that are in memory at a time
_SLACK = 1e-3  # of a bound in float32, more than its rounding

Spectra = npt.NDArray[np.complex64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Look:
    """A slide as it is compared.

    Attributes:
        energy: standard deviation of its grey values.
        square: (SIDE + 1, SIDE + 1), of norm 1; 0 where there is no picture.
    """

    energy: float
    square: Floats

    @property
    def spectra(self) -> Spectra:
        """(8, 2 * SIDE, SIDE + 1): of the picture turned and flipped in eight ways."""
        ways = [np.rot90(one, turns) for one in (self.square, self.square.T) for turns in range(4)]
        return _spectra(np.stack(ways))


def _spectra(squares: Floats) -> Spectra:
    return np.asarray(fft.rfft2(squares, (2 * SIDE, 2 * SIDE)), np.complex64)


def correlation(one: Look, other: Look) -> float:
    """The largest over all shifts, quarter turns and flips, -1 to 1."""
    return float(_largest(one.spectra[:1], other.spectra)[0])


def _largest(plain: Spectra, ways: Spectra, jobs: int = 1) -> Floats:
    """(N,): the largest correlations of N pictures with another in some ways, over all shifts."""
    found = []
    for first in range(0, len(plain), _BATCH):
        products = plain[first : first + _BATCH, None].conj() * ways
        shifts = fft.irfft2(products, (2 * SIDE, 2 * SIDE), overwrite_x=True, workers=jobs)
        found.append(shifts.max((1, 2, 3)))
    return np.concatenate(found)


class _Block:
    """Some of the looks, and their spectra while they are compared.

    Args:
        numbers: of these looks among all.
        looks: these.
    """

    # of a real picture |A_k| = |A_-k|: half a turn changes no magnitude
    _DIFFERENT = (0, 1, 4, 5)  # the other ways are two further on

    def __init__(self, numbers: npt.NDArray[np.int64], looks: Sequence[Look]) -> None:
        self.numbers, self.looks = numbers, looks
        self.energies = np.array([look.energy for look in looks])

    @cached_property
    def plain(self) -> Spectra:
        """(looks, 2 * SIDE, SIDE + 1): as they are."""
        return _spectra(np.stack([look.square for look in self.looks]))

    @cached_property
    def turned(self) -> Spectra:
        """(8, looks, 2 * SIDE, SIDE + 1): in all ways."""
        return np.stack([look.spectra for look in self.looks], 1)

    @cached_property
    def magnitudes(self) -> Floats:
        """(4, looks, frequencies): in the ways in which they differ; a row has length 1."""
        return np.stack([_magnitudes(self.turned[way]) for way in self._DIFFERENT])

    def bounds(self, other: _Block) -> Floats:
        """(4, own looks, those of the other): what correlations are at most, by way."""
        flat = self.magnitudes.reshape(-1, self.magnitudes.shape[-1])
        found = flat @ _magnitudes(other.plain).T  # of two matrices, or it is much slower
        return found.reshape(len(self._DIFFERENT), len(self.looks), -1)

    def correlate(self, other: _Block, wanted: Bools, jobs: int) -> npt.NDArray[np.float64]:
        """(own looks, those of the other): the largest in the ways wanted, -1 elsewhere.

        Args:
            wanted: (4, own looks, those of the other).
        """
        found = np.full(wanted.shape[1:], -1.0)
        for number, row in np.argwhere(wanted.any(2)).tolist():
            way, some = self._DIFFERENT[number], np.flatnonzero(wanted[number, row])
            values = _largest(other.plain[some], self.turned[[way, way + 2], row], jobs)
            found[row, some] = np.maximum(found[row, some], values)
        return found


def _magnitudes(spectra: Spectra) -> Floats:
    """(N, frequencies): half of them are stored, and count twice but for those on the edges."""
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
    """All pairs of looks of different kinds that correlate, by their numbers, in order.

    Args:
        looks: N of them.
        kinds: of each; those of one kind are not compared.
        least: correlation from which a pair is one.
        energy: how many times the energy of one may be that of the other.
        jobs: threads.
        progress: is called with the number of pairs that are done.
    """
    codes = {kind: code for code, kind in enumerate(dict.fromkeys(kinds))}
    of = np.array([codes[kind] for kind in kinds], np.int64)
    found: list[tuple[int, int]] = []
    for one, other in _block_pairs(looks):
        wanted = _allowed(one, other, of, energy)
        if wanted.any():
            maybe = (one.bounds(other) >= least - _SLACK) & wanted
            rows, columns = np.nonzero(one.correlate(other, maybe, jobs) >= least)
            pairs = zip(one.numbers[rows].tolist(), other.numbers[columns].tolist(), strict=True)
            found += [(min(pair), max(pair)) for pair in pairs]
        if progress is not None:
            count = len(one.looks)
            progress(count * (count - 1) // 2 if one is other else count * len(other.looks))
    return sorted(found)


def _block_pairs(looks: Sequence[Look]) -> Iterator[tuple[_Block, _Block]]:
    """Every two blocks once, each with itself; looks of less energy come first."""
    order = np.argsort([look.energy for look in looks], kind="stable")
    parts = [order[first : first + _BLOCK] for first in range(0, len(order), _BLOCK)]
    for place, part in enumerate(parts):
        one = _Block(part, [looks[number] for number in part.tolist()])
        yield one, one
        for later in parts[place + 1 :]:
            yield one, _Block(later, [looks[number] for number in later.tolist()])


def _allowed(one: _Block, other: _Block, kinds: npt.NDArray[np.int64], energy: float) -> Bools:
    """(looks of one, looks of the other): pairs that are to be compared at all."""
    found = kinds[one.numbers][:, None] != kinds[other.numbers][None]
    found &= other.energies[None] <= energy * one.energies[:, None]
    found &= one.energies[:, None] <= energy * other.energies[None]
    if one is other:
        found &= np.triu(np.ones_like(found), 1)
    return np.asarray(found)
