"""Per-channel mean and standard deviation of a data set, cached beside it.

Sums of integers are exact, so they are equal for any number of ranks. Those of floats are merged
as (count, mean, sum of squared deviations) (Chan, Golub, LeVeque 1983, section 2).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from spatialdl.comm.communicator import Communicator
from spatialdl.common.files import load_json, save_json
from spatialdl.data.format import MANIFEST, sha256_of
from spatialdl.data.image_source import Box, Pixels, whole_box
from spatialdl.data.shards import ShardDataset

log = logging.getLogger("spatialdl.data")

FILE = "statistics.json"
"""Cache file beside the manifest; ignored if the manifest has changed."""

_AT_ONCE = 2**22
"""Approximate number of values read at once."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of stored pixels.

    Attributes:
        mean, std: one number per channel.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass
class RunningMoments:
    """Running count, and per channel mean and sum of squared deviations."""

    count: int
    mean: npt.NDArray[Any]
    squares: npt.NDArray[Any]

    @classmethod
    def of(cls, pixels: Pixels) -> RunningMoments:
        """Moments of an array (..., channels); exact fractions for integers."""
        rows = pixels.reshape(-1, pixels.shape[-1])
        count = len(rows)
        if pixels.dtype.kind in "iu":
            wide = rows.astype(np.int64)  # squares of 16-bit values have 32 bits
            total = [int(x) for x in wide.sum(0)]
            squares = [int(x) for x in (wide * wide).sum(0)]
            mean = [Fraction(x, count) for x in total]
            apart = [y - Fraction(x * x, count) for x, y in zip(total, squares, strict=True)]
            return cls(count, np.array(mean, object), np.array(apart, object))
        wide = rows.astype(np.float64)
        mean = wide.mean(0)
        return cls(count, mean, np.square(wide - mean).sum(0))

    def with_others(self, other: RunningMoments) -> RunningMoments:
        """Merged moments of both."""
        count, apart = self.count + other.count, other.mean - self.mean
        share = Fraction(other.count, count)
        if self.mean.dtype != object:
            share = float(share)  # type: ignore[assignment]
        squares = self.squares + other.squares + apart * apart * (share * self.count)
        return RunningMoments(count, self.mean + apart * share, squares)

    def statistics(self) -> Statistics:
        """Mean and (population) standard deviation."""
        stds = [math.sqrt(square / self.count) for square in self.squares]
        found = Statistics(tuple(map(float, self.mean)), tuple(stds))
        if self.mean.dtype == object:
            return found
        # Rounded, because the last digits depend on the number of ranks.
        mean, std = (tuple(float(f"{x:.12g}") for x in of) for of in (found.mean, found.std))
        return Statistics(mean, std)


def statistics_of(source: ShardDataset, split: str | None, world: Communicator) -> Statistics:
    """Statistics of a split of a data set, cached or computed; collective over all ranks.

    Raises:
        ValueError: a channel is constant, or there are NaN or infinities.
        ShardError: a file cannot be read.
    """
    digest = sha256_of(source.path / MANIFEST)
    known = world.bcast(_known(source.path, digest, split) if world.rank == 0 else None)
    if known is not None:
        return _checked(known, source.path)
    log.info("%s: computing mean and std of all pixels of split %s", source.path, split)
    own = _combined(_moments(source, range(world.rank, len(source), world.size), world.rank == 0))
    total = _combined(one for one in world.allgather(own) if one is not None)
    assert total is not None  # a split has samples
    found = _checked(total.statistics(), source.path)
    if world.rank == 0:
        _keep(source.path, digest, split, found)
    return found


def _moments(source: ShardDataset, samples: range, shows: bool) -> Iterator[RunningMoments]:
    numbers = tqdm(samples, "mean and std", disable=not shows, leave=False, mininterval=2, delay=2)
    for sample in numbers:
        for box in _bands(source, sample):
            yield RunningMoments.of(source.read(sample, box))


def _bands(source: ShardDataset, sample: int) -> Iterator[Box]:
    """Boxes of some rows, or slices, that cover an image."""
    size = source.image_size(sample)
    step = max(1, _AT_ONCE // (math.prod(size[1:]) * source.channels))
    for first in range(0, size[0], step):
        yield (first, min(first + step, size[0]), *whole_box(size)[2:])


def _combined(parts: Iterable[RunningMoments]) -> RunningMoments | None:
    total: RunningMoments | None = None
    for part in parts:
        total = part if total is None else total.with_others(part)
    return total


def _checked(found: Statistics, folder: Path) -> Statistics:
    if not all(map(math.isfinite, (*found.mean, *found.std))):
        raise ValueError(
            f"data.mean=dataset: the images of {folder} have NaN or infinite pixels: give numbers "
            "for data.mean and data.std"
        )
    constant = [number for number, std in enumerate(found.std) if std == 0]
    if constant:
        raise ValueError(
            f"data.std=dataset: channel {constant[0]} of all images of {folder} is constant "
            "(std 0): give numbers for data.mean and data.std"
        )
    return found


def _known(folder: Path, digest: str, split: str | None) -> Statistics | None:
    """Cached statistics of a split, if the file is valid and matches the manifest."""
    content = load_json(folder / FILE)
    if not isinstance(content, dict) or content.get("manifest") != digest:
        return None
    try:
        found = content["splits"][_name(split)]
        return Statistics(*(tuple(float(x) for x in found[key]) for key in ("mean", "std")))
    except (KeyError, TypeError, ValueError):
        return None


def _keep(folder: Path, digest: str, split: str | None, found: Statistics) -> None:
    content = load_json(folder / FILE)
    if not isinstance(content, dict) or content.get("manifest") != digest:
        content = {"manifest": digest}
    splits = content.get("splits")
    content["splits"] = splits if isinstance(splits, dict) else {}
    content["splits"][_name(split)] = {"mean": found.mean, "std": found.std}
    try:
        save_json(folder / FILE, content)
    except OSError as error:  # e.g. a read-only data set, which must not end the run
        log.warning("cannot write %s (%s): the next run computes it again", folder / FILE, error)


def _name(split: str | None) -> str:
    return "" if split is None else split
