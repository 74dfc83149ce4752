"""Slides that differ from the others in what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spatialdl.slides.cohort.measuring import MEASURES, SlideMeasures

_BY_FACTORS = ("tissue_mm2", "tiles")  # compared by their logarithms
_FEWEST, _FAR = 5, 3.5
_OF_DEVIATION, _OF_DISTANCE = 1.4826, 1.2533  # a normal distribution's deviation in these


def outlying(found: Sequence[SlideMeasures]) -> list[dict[str, float]]:
    """For each slide the measures in which it is an outlier, with its modified z-score.

    Beyond 3.5 median absolute deviations, scaled as in B. Iglewicz and D. Hoaglin, "How to detect
    and handle outliers", 1993, section 3.3. Measures known of fewer than five slides have none.
    """
    scores: list[dict[str, float]] = [{} for _ in found]
    for name in MEASURES:
        values = np.array([one.numbers.get(name, np.nan) for one in found], float)
        far = modified_z(np.log1p(values) if name in _BY_FACTORS else values)
        for score, value in zip(scores, far.tolist(), strict=True):
            if abs(value) > _FAR:
                score[name] = value
    return scores


def modified_z(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Distances from the median in robust standard deviations; NaN where there is none."""
    known = values[np.isfinite(values)]
    nothing: npt.NDArray[np.float64] = np.full(len(values), np.nan)
    if len(known) < _FEWEST:
        return nothing
    apart = np.abs(known - np.median(known))
    spread = _OF_DEVIATION * np.median(apart)
    if spread <= _least(known):  # most are alike
        spread = _OF_DISTANCE * apart.mean()
    return nothing if spread <= _least(known) else (values - np.median(known)) / spread


def _least(known: npt.NDArray[np.float64]) -> float:
    """Less is rounding."""
    return 1e-9 * max(1.0, float(np.abs(known).max()))
