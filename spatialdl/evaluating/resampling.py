"""Bootstrap confidence intervals of metrics over units (patients, slides or tiles).

Whole units are drawn with replacement, since tiles of a slide and slides of a patient are
correlated: the cluster bootstrap of Davison and Hinkley (1997), Bootstrap Methods and their
Application, section 3.8. Intervals are percentiles of the resampled metric (section 5.3 there).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

Floats = npt.NDArray[np.float64]
_CELLS = 2**23  # weights in memory at a time
_LEAST = 0.5  # share of resamples that must define a metric for it to have an interval


class Scored(Protocol):
    """Samples whose metrics can be computed for any weights of their units."""

    @property
    def units(self) -> int: ...

    @property
    def samples(self) -> int: ...

    def metrics(self, weights: Floats) -> Mapping[str, Floats]:
        """Metrics by name, (B,) or (B, classes), NaN if undefined, for weights (B, units)."""
        ...


class Interval(NamedTuple):
    """The limits of a confidence interval, NaN if there is none."""

    low: float
    high: float


class Resampling(NamedTuple):
    """Settings of the bootstrap.

    Attributes:
        resamples: number of resamples; 0 for no intervals.
        confidence: share of resamples between the limits.
        seed: seed of the draws.
    """

    resamples: int = 1000
    confidence: float = 0.95
    seed: int = 0


def point(scored: Scored) -> dict[str, Floats]:
    """Point estimates of the metrics, each () or (classes,)."""
    return {name: found[0] for name, found in scored.metrics(np.ones((1, scored.units))).items()}


def intervals(scored: Scored, how: Resampling, title: str = "") -> dict[str, list[Interval]]:
    """Confidence intervals of every metric, one per class where it has several.

    Intervals are NaN with fewer than two units, or if fewer than half of the resamples define the
    metric.
    """
    names = point(scored)
    if how.resamples == 0 or scored.units < 2:
        none = Interval(np.nan, np.nan)
        return {name: [none] * np.size(value) for name, value in names.items()}
    found: dict[str, list[Floats]] = {name: [] for name in names}
    with tqdm(total=how.resamples, desc=title, unit="resample", delay=2, leave=False) as bar:
        for weights in drawn(scored, how):
            for name, values in scored.metrics(weights).items():
                found[name].append(values.reshape(len(weights), -1))
            bar.update(len(weights))
    return {name: _limits(np.concatenate(parts), how) for name, parts in found.items()}


def drawn(scored: Scored, how: Resampling) -> Iterator[Floats]:
    """Iterate over weights (resamples, units): how often each unit is drawn."""
    rng = np.random.default_rng(how.seed)
    units = scored.units
    at_once = max(1, _CELLS // max(units, scored.samples))
    for first in range(0, how.resamples, at_once):
        many = min(at_once, how.resamples - first)
        yield np.stack(
            [np.bincount(rng.integers(units, size=units), minlength=units) for _ in range(many)]
        ).astype(np.float64)


def _limits(values: Floats, how: Resampling) -> list[Interval]:
    tail = 100 * (1 - how.confidence) / 2
    limits = []
    for column in values.T:
        known = column[np.isfinite(column)]
        if len(known) < _LEAST * len(column):
            limits.append(Interval(np.nan, np.nan))
            continue
        low, high = np.percentile(known, (tail, 100 - tail))
        limits.append(Interval(float(low), float(high)))
    return limits
