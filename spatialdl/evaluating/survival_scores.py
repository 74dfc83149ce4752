"""Concordance index of weighted samples, for all resamples at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spatialdl.evaluating.scores import divided

Floats = npt.NDArray[np.float64]

_CELLS = 2**22  # pairs at a time


class SurvivalScores:
    """Scores of survival predictions.

    Args:
        values: (N, 1), risks.
        truth: (N, 2), the time, and 1 for an event or 0 for censoring.
        unit: (N,), index of each sample's unit.
    """

    def __init__(self, values: Floats, truth: Floats, unit: npt.NDArray[np.int64]) -> None:
        self.risks, self.times, self.events = values[:, 0], truth[:, 0], truth[:, 1] == 1
        self.unit, self.samples = unit, len(values)
        self.units = int(unit.max()) + 1 if len(unit) else 0

    def metrics(self, weights: Floats) -> dict[str, Floats]:
        """Harrell's concordance index (B,), see `training.tasks.concordance`.

        A pair is weighted by the product of its samples' weights.
        """
        drawn = weights[:, self.unit]
        right, pairs = np.zeros(len(weights)), np.zeros(len(weights))
        first = np.flatnonzero(self.events)
        step = max(1, _CELLS // max(self.samples, 1))
        for some in (first[k : k + step] for k in range(0, len(first), step)):
            times, risks = self.times[some, None], self.risks[some, None]
            known = (times < self.times) | ((times == self.times) & ~self.events)
            higher = 0.5 * ((risks > self.risks) + 1.0 * (risks >= self.risks)) * known
            right += (drawn[:, some] * (drawn @ higher.T)).sum(1)
            pairs += (drawn[:, some] * (drawn @ known.T)).sum(1)
        return {"c_index": divided(right, pairs)}
