"""Curves of a run: loss, validation metrics, learning rate and speed over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spatialdl.common.text import counted
from spatialdl.training.progress import COUNTS, METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_POINTS = 1000
"""Points per curve; longer runs are drawn as means of consecutive steps."""

_SMOOTH_OVER = 0.05  # share of the steps in the running mean
_POINTS_UP_TO = 40  # maximum number of steps drawn with markers
_LOG_ABOVE = 10  # ratio of highest to median training loss above which the axis is logarithmic
BLUE, ORANGE, GREY, GREEN = "#1f5fa8", "#d1701f", "#8a8a8a", "#2f8f5b"
_COLOURS = ORANGE, BLUE, GREY, GREEN, "#8b4fa3", "#a8842c", "#3b9bb3", "#b0405c"
_LABELS = {
    "accuracy": "accuracy",
    "mean_dice": "Dice",
    "mean_iou": "IoU",
    "auroc": "AUROC",
    "slide_accuracy": "slide accuracy",
    "slide_auroc": "slide AUROC",
    "rmse": "RMSE",
    "mae": "mean absolute error",
}
FEW = 10
"""Metrics of fewer samples or slides are not drawn: one moves an accuracy by over 10 %."""
_ERRORS = ("rmse", "mae")
_SHARES = tuple(name for name in _LABELS if name not in _ERRORS)
_BUILT_IN = {"step", "loss", *COUNTS, *(name for names in METRICS.values() for name in names)}


def draw_curves(
    title: str, steps: Sequence[Mapping[str, float]], validations: Sequence[Mapping[str, Any]]
) -> Figure:
    """Draw loss, metrics, learning rate and images per second; needs at least one step."""
    from matplotlib.figure import Figure  # instead of pyplot, which has global state and a GUI

    rows = thinned(steps)
    figure = Figure(figsize=(11.5, 6.2), dpi=150, layout="constrained")
    (loss, metrics), (rate, speed) = figure.subplots(2, 2, sharex=True, height_ratios=(3, 2))
    with np.errstate(invalid="ignore"):
        draw_loss(loss, rows, validations)
        if validations:
            draw_metrics(metrics, validations)
    if not metrics.lines:
        metrics.set_visible(False)
    loss.set_title(title, loc="left")
    marker = "o" if len(rows) < 2 else None
    x = [row["step"] for row in rows]
    for panel, name, colour in ((rate, "learning_rate", BLUE), (speed, "images_per_second", GREY)):
        panel.plot(x, [row[name] for row in rows], color=colour, marker=marker, lw=1)
        panel.set_ylabel(name.replace("_", " "))
        panel.set_ylim(bottom=0)
        panel.set_xlabel("step")
        panel.xaxis.get_major_locator().set_params(integer=True)
    if len(rows) < 2:
        rate.set_xlim(x[0] - 1, x[0] + 1)
    for panel in (loss, metrics, rate, speed):
        panel.grid(color="0.9")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def thinned(steps: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Average consecutive rows so that at most `MOST_POINTS` are left."""
    if len(steps) <= MOST_POINTS:
        return [dict(row) for row in steps]
    names = ("step", "loss", "learning_rate", "images_per_second")
    values = np.array([[row[name] for name in names] for row in steps])
    means = (part.mean(0) for part in np.array_split(values, MOST_POINTS))
    return [dict(zip(names, mean.tolist(), strict=True)) for mean in means]


def draw_loss(
    panel: Axes,
    steps: Sequence[Mapping[str, float]],
    validations: Sequence[Mapping[str, Any]],
) -> None:
    x = np.array([row["step"] for row in steps])
    loss = np.array([row["loss"] for row in steps])
    marker = "o" if len(steps) <= _POINTS_UP_TO else None
    panel.plot(x, loss, color=GREY, linewidth=0.8, marker=marker, markersize=3, label="training")
    width = round(len(steps) * _SMOOTH_OVER)
    if width > 1:
        panel.plot(x, _smoothed(loss, width), color=BLUE, label=f"training, mean of {width} steps")
    if validations:
        panel.plot(
            [row["step"] for row in validations],
            [row["loss"] for row in validations],
            color=ORANGE,
            marker="o",
            markersize=4,
            label="validation",
        )
    panel.set_ylabel("loss")
    highest = max([*loss, *(row["loss"] for row in validations)])
    if min(loss) > 0 and highest > _LOG_ABOVE * np.median(loss):
        panel.set_yscale("log")  # one high early value would flatten the curve
    panel.legend(frameon=False)


def draw_metrics(panel: Axes, validations: Sequence[Mapping[str, Any]]) -> None:
    """Draw metrics in percent, or errors if the task has none.

    Undefined metrics are left out, and those of fewer than `FEW` samples or slides.
    """
    few, prefix = few_validated(validations) or ("", None)
    shares = [name for name in _SHARES if name in validations[0]]
    names = shares or [name for name in _ERRORS if name in validations[0]]
    names += _own_shares(validations) if shares else []
    names = [
        name
        for name in names
        if any(row[name] is not None for row in validations)
        and not (prefix is not None and name.startswith(prefix))
    ]
    steps = [row["step"] for row in validations]
    for name, colour in zip(names, _COLOURS, strict=False):
        scale = 100 if shares else 1
        values = [np.nan if row[name] is None else scale * row[name] for row in validations]
        label = _LABELS.get(name, name)
        panel.plot(steps, values, color=colour, marker="o", markersize=4, label=label)
    names = names[: len(_COLOURS)]
    if shares:
        panel.set_ylim(-3, 103)  # so that lines and points at 0 and 100 are drawn in full
    panel.set_ylabel("validation, %" if shares else "validation, units of the target")
    if few:
        panel.plot([], [], " ", label=f"{few}: too few to draw their metrics")
    if names or few:
        columns = len(names) if len(names) <= 3 else 2  # a wider legend would shrink the panel
        panel.legend(frameon=False, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1))


def few_validated(validations: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """What was validated in so small a number that its metrics say little; None if nothing.

    Returns:
        The number with its noun, such as "2 slides", and the prefix of the names of these metrics.
    """
    last = validations[-1] if validations else {}
    samples, slides = last.get("samples"), last.get("slides")
    if samples is not None and samples < FEW and "mean_dice" not in last:  # Dice counts pixels
        return counted(samples, "validation sample"), ""
    return (counted(slides, "slide"), "slide_") if slides is not None and slides < FEW else None


def _own_shares(validations: Sequence[Mapping[str, Any]]) -> list[str]:
    """User metrics with all values between 0 and 1."""
    return [
        name
        for name in validations[0]
        if name.removeprefix("slide_") not in _BUILT_IN
        and name != "slide_vote_accuracy"
        and all(_is_share(row.get(name)) for row in validations)
    ]


def _is_share(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and 0 <= value <= 1)


def _smoothed(values: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """Centred running mean, with a shorter window at both ends."""
    window = np.ones(width)
    weights = np.convolve(np.ones(len(values)), window, mode="same")
    return np.asarray(np.convolve(values, window, mode="same") / weights)
