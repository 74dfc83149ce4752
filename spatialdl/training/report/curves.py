"""Training curves of a report, as one SVG without embedded fonts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from spatialdl.pages.writing import as_svg
from spatialdl.training.pictures.loss_curve import BLUE, GREY, draw_loss, draw_metrics

MOST_POINTS = 1000
"""Points per curve; longer runs are drawn as means of consecutive steps."""


def curves(
    steps: Sequence[Mapping[str, float]], validations: Sequence[Mapping[str, Any]]
) -> Markup:
    """Draw loss, metrics, learning rate and images per second; needs at least one step."""
    from matplotlib.figure import Figure

    rows = thinned(steps)
    figure = Figure(figsize=(11.5, 6.2), layout="constrained")
    (loss, metrics), (rate, speed) = figure.subplots(2, 2, sharex=True, height_ratios=(3, 2))
    with np.errstate(invalid="ignore"):
        draw_loss(loss, rows, validations)
        if validations:
            draw_metrics(metrics, validations)
    if not metrics.lines:
        metrics.set_visible(False)
    marker = "o" if len(rows) < 2 else None
    x = [row["step"] for row in rows]
    rate.plot(x, [row["learning_rate"] for row in rows], color=BLUE, marker=marker)
    rate.set_ylabel("learning rate")
    rate.set_ylim(bottom=0)
    speed.plot(x, [row["images_per_second"] for row in rows], color=GREY, marker=marker, lw=1)
    speed.set_ylabel("images per second")
    speed.set_ylim(bottom=0)
    if len(rows) < 2:
        rate.set_xlim(x[0] - 1, x[0] + 1)
    for panel in (loss, metrics, rate, speed):
        panel.grid(color="0.9")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in (rate, speed):
        panel.set_xlabel("step")
        panel.xaxis.get_major_locator().set_params(integer=True)
    return as_svg(figure)


def thinned(steps: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Average consecutive rows so that at most `MOST_POINTS` are left."""
    if len(steps) <= MOST_POINTS:
        return [dict(row) for row in steps]
    names = ("step", "loss", "learning_rate", "images_per_second")
    values = np.array([[row[name] for name in names] for row in steps])
    means = (part.mean(0) for part in np.array_split(values, MOST_POINTS))
    return [dict(zip(names, mean.tolist(), strict=True)) for mean in means]
