"""Confidence intervals of metrics by the bootstrap over units (patients, slides or tiles).

Whole units are drawn with replacement, since tiles of a slide and slides of a patient are alike:
the cluster bootstrap of Davison and Hinkley (1997), Bootstrap Methods and their Application,
section 3.8. Intervals are the percentiles of what the metric comes to (section 5.3 there).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

Floats = npt.NDArray[np.float64]
_CELLS = 2**23  # weights that are held at a time
_LEAST = 0.5  # of the resamples must have a metric, for it to have an interval


class Scored(Protocol):
    """Samples whose metrics are known for any weights of their units."""

    @property
    def units(self) -> int: ...

    @property
    def samples(self) -> int: ...

    def metrics(self, weights: Floats) -> Mapping[str, Floats]:
        """By name float64 (B,) or (B, classes), NaN where undefined, for weights (B, units)."""
        ...


class Interval(NamedTuple):
    """The limits, NaN where there are none."""

    low: float
    high: float


class Resampling(NamedTuple):
    """How often, and how sure.

    Attributes:
        resamples: how many; 0 for no intervals.
        confidence: share of them between the limits.
        seed: of the draws.
    """

    resamples: int = 1000
    confidence: float = 0.95
    seed: int = 0


def point(scored: Scored) -> dict[str, Floats]:
    """Metrics of the samples as they are, each () or (classes,)."""
    return {name: found[0] for name, found in scored.metrics(np.ones((1, scored.units))).items()}


def intervals(scored: Scored, how: Resampling, title: str = "") -> dict[str, list[Interval]]:
    """Of every metric, for each class where it has several.

    None of them has an interval where there are fewer than two units, and one has none where fewer
    than half of the resamples have it.
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
    """Weights (some resamples, units): how often each unit is drawn."""
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
