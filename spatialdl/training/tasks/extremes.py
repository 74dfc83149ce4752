"""Which samples were told worst and best."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from spatialdl.training.tasks.task import SampleTask

SHOWN = 4
"""So many of the worst, and of the best."""

_DIGITS = 12  # so that what only rounding tells apart has the same order in every layout


def errors_of(task: SampleTask, values: Tensor, labels: Tensor) -> Tensor:
    """(N,): 1 - the probability of the true class, or the mean distance to what is known, or NaN.

    Args:
        values: (N, columns), predictions.
        labels: (N,) or (N, columns).
    """
    if task.name == "classification":
        return 1 - values.gather(1, labels[:, None])[:, 0]
    return (values - labels).abs().nanmean(1)


def extremes(errors: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Samples and their errors: the worst and the best ones, the worst first; NaN are left out."""
    known = [(sample, error) for sample, error in errors if error == error]  # noqa: PLR0124
    ordered = sorted(known, key=lambda one: (-round(one[1], _DIGITS), one[0]))
    return ordered if len(ordered) <= 2 * SHOWN else ordered[:SHOWN] + ordered[-SHOWN:]
