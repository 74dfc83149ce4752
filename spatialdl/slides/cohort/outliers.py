"""Outliers among the measures of slides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spatialdl.slides.cohort.measuring import MEASURES, SlideMeasures

_BY_FACTORS = ("tissue_mm2", "tiles")  # compared by their logarithms
_FEWEST, _FAR = 5, 3.5
# of a normal distribution, standard deviation / median and / mean absolute deviation
_OF_DEVIATION, _OF_DISTANCE = 1.4826, 1.2533


def outlying(measured: Sequence[SlideMeasures]) -> list[dict[str, float]]:
    """Return, for each slide, the modified z-scores of measures in which it is an outlier.

    An outlier is beyond 3.5 median absolute deviations, scaled as in B. Iglewicz and D. Hoaglin,
    "How to detect and handle outliers", 1993, section 3.3. Measures known of fewer than five
    slides have no outliers.
    """
    scores: list[dict[str, float]] = [{} for _ in measured]
    for name in MEASURES:
        values = np.array([each.numbers.get(name, np.nan) for each in measured], float)
        far = modified_z(np.log1p(values) if name in _BY_FACTORS else values)
        for score, value in zip(scores, far.tolist(), strict=True):
            if abs(value) > _FAR:
                score[name] = value
    return scores


def modified_z(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return distances from the median in robust standard deviations; NaN if undefined."""
    known = values[np.isfinite(values)]
    undefined: npt.NDArray[np.float64] = np.full(len(values), np.nan)
    if len(known) < _FEWEST:
        return undefined
    distances = np.abs(known - np.median(known))
    spread = _OF_DEVIATION * np.median(distances)
    if spread <= _least(known):  # more than half of the values are equal
        spread = _OF_DISTANCE * distances.mean()
    return undefined if spread <= _least(known) else (values - np.median(known)) / spread


def _least(known: npt.NDArray[np.float64]) -> float:
    """The smallest spread that is not a rounding error."""
    return 1e-9 * max(1.0, float(np.abs(known).max()))
