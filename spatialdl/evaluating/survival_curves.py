"""Kaplan-Meier curves of the halves of samples with higher and lower predicted risk.

Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations", J. Am. Stat. Assoc. 53,
1958 (https://doi.org/10.1080/01621459.1958.10501452).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from spatialdl.evaluating.levels import Level
    from spatialdl.evaluating.measured import Measured

Floats = npt.NDArray[np.float64]

_HALVES = (("lower risk", "#1f5fa8"), ("higher risk", "#e6550d"))


def kaplan_meier(times: Floats, events: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Sorted event times and the estimated survival after each, both (E,).

    Args:
        times: (N,), times of the event or of censoring.
        events: (N,), whether the event occurred.
    """
    found = np.unique(times[events])
    at_risk = (times[None] >= found[:, None]).sum(1)
    died = ((times[None] == found[:, None]) & events[None]).sum(1)
    return found, np.cumprod(1 - died / np.maximum(at_risk, 1))


def draw_survival(
    panel: Any, level: Level, classes: Sequence[str], found: Sequence[Measured]
) -> str:
    """Draw a curve per half, with a tick at each censoring.

    Returns:
        Why it cannot be drawn, else an empty text.
    """
    risks, times, events = level.values[:, 0], level.truth[:, 0], level.truth[:, 1] == 1
    if not events.any():
        return "no event"
    is_high = risks > np.median(risks)
    for (name, colour), chosen in zip(_HALVES, (~is_high, is_high), strict=True):
        if chosen.any():
            _draw(panel, times[chosen], events[chosen], name, colour)
    value = next((one for one in found if one.metric == "c_index"), None)
    title = "" if value is None else f"concordance index {value.estimate:.3f}"
    if value is not None and not np.isnan(value.interval.low):
        title += f" [{value.interval.low:.3f}, {value.interval.high:.3f}]"
    panel.set_ylim(-0.02, 1.02)
    panel.set_xlim(0, float(times.max()) * 1.02 or 1)
    panel.set_xlabel(classes[0])
    panel.set_ylabel("share without an event")
    panel.grid(color="0.92")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7.5, loc="best", framealpha=0.85, title=title, title_fontsize=7.5)
    return ""


def _draw(panel: Any, times: Floats, events: npt.NDArray[np.bool_], name: str, colour: str) -> None:
    at, survived = kaplan_meier(times, events)
    x = np.r_[0.0, at, times.max()]
    y = np.r_[1.0, survived, survived[-1] if len(survived) else 1.0]
    label = f"{name} ({len(times):,}, {int(events.sum()):,} events)"
    panel.plot(x, y, color=colour, lw=1.6, drawstyle="steps-post", label=label)
    ends = times[~events]
    heights = y[np.searchsorted(np.r_[0.0, at], ends, side="right") - 1]
    panel.plot(ends, heights, "|", color=colour, ms=5, mew=0.8)
