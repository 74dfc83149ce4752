"""Pictures of an evaluation: curves, calibration, confusion, predictions over targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from spatialdl.common.text import fitted
from spatialdl.inference.evaluating.levels import Level
from spatialdl.inference.evaluating.measured import ALL, Measured, shown_value
from spatialdl.inference.evaluating.scores import (
    BINS,
    Curve,
    PixelScores,
    Ranking,
    bins_of,
    from_confusion,
)
from spatialdl.inference.predicting.pictures import (
    SMALL,
    TITLE,
    colours_of,
    confusion_side,
    draw_confusion,
    draw_numbers,
    new_figure,
    save_figure,
    style_axes,
)

_MOST_CURVES = 8
_MOST_CLASSES = 20  # classes of a readable confusion matrix
_MOST_POINTS = 20_000
_LONGEST = 24  # characters of a name
Floats = npt.NDArray[np.float64]
_OF_CLASSES = ("classification", "multilabel")
_UNDEFINED = "undefined"
FEW = 5
"""Curves need as many samples with and without the class; calibration twice as many in all."""


def save_pictures(
    folder: Path, levels: Sequence[Level], classes: Sequence[str], found: Sequence[Measured]
) -> dict[str, Path]:
    """Draw the pictures of the task.

    Returns:
        Files by title.
    """
    pictures: list[tuple[str, str, Callable[..., str], tuple[str, ...]]] = [
        ("roc", "ROC curves", _draw_roc, _OF_CLASSES),
        ("precision-recall", "Precision and recall", _draw_precision, _OF_CLASSES),
        ("calibration", "Calibration", _draw_bins, _OF_CLASSES),
        ("confusion", "Confusion", _draw_confusion, ("classification", "segmentation")),
        ("dice", "Dice", _draw_dice, ("segmentation",)),
        ("regression", "Predictions and targets", _draw_numbers, ("regression",)),
        ("survival", "Survival by predicted risk", _draw_survival, ("survival",)),
    ]
    paths = {}
    for name, title, draw, tasks in pictures:
        large = draw is _draw_confusion and len(classes) > _MOST_CLASSES
        if levels[0].task in tasks and not large:
            path = folder / f"{name}.png"
            if _save(path, levels, classes, found, draw):
                paths[title] = path
            else:
                path.unlink(missing_ok=True)  # left by an earlier evaluation
    return paths


def _save(
    path: Path,
    levels: Sequence[Level],
    classes: Sequence[str],
    found: Sequence[Measured],
    draw: Callable[..., str],
) -> bool:
    """Save a panel per level (regression: a row per target); False if all are undefined.

    Args:
        draw: draws a panel; returns why it cannot, else an empty text.
    """
    if draw is _draw_confusion and levels[0].task == "segmentation":
        levels = levels[:1]  # pixel counts are the same at all levels
    targets = classes[:_MOST_CURVES] if draw is _draw_numbers else [""]
    side = 4.4 if draw is not _draw_confusion else confusion_side(len(classes))
    figure = new_figure(side * 1.08 * len(levels), side * len(targets))
    panels = figure.subplots(len(targets), len(levels), squeeze=False).ravel()
    reasons = []
    for panel, (target, level) in zip(panels, product(targets, levels), strict=True):
        own = [one for one in found if one.level == level.name and one.group == ALL]
        reasons.append(
            draw(panel, level, [target] if target else classes, own, *_at(classes, target))
        )
        before = f"{fitted(target, _LONGEST)}, " if target else ""
        after = _left_out(classes) if draw in (_draw_roc, _draw_precision) else ""
        title = f"{before}by {level.name}, n = {len(level):,}{after}"
        panel.set_title(title, fontsize=TITLE, loc="left")
        if reasons[-1]:
            middle = {"ha": "center", "va": "center", "transform": panel.transAxes}
            white = {"facecolor": "white", "edgecolor": "none"}
            panel.text(0.5, 0.5, reasons[-1], color="0.35", fontsize=TITLE, bbox=white, **middle)
    if set(reasons) == {_UNDEFINED}:
        return False
    save_figure(path, figure)
    return True


def _left_out(classes: Sequence[str]) -> str:
    count = len(classes)
    return f", {_MOST_CURVES} of {count} classes" if count > _MOST_CURVES else ""


def _at(classes: Sequence[str], target: str) -> list[int]:
    return [classes.index(target)] if target else []


# --- curves


def _draw_roc(panel: Any, level: Level, classes: Sequence[str], found: Sequence[Measured]) -> str:
    panel.plot([0, 1], [0, 1], color="0.6", lw=1, ls="--", label="chance")
    curves, reason = _curves(level, classes, found, "auroc")
    for colour, label, curve, _ in curves:
        panel.plot(curve.false_positive, curve.recall, color=colour, lw=1.6, label=label)
    x, y = "false positive rate (1 - specificity)", "true positive rate (sensitivity)"
    _finish(panel, x, y, "lower right", not reason, "AUROC")
    return reason


def _draw_precision(
    panel: Any, level: Level, classes: Sequence[str], found: Sequence[Measured]
) -> str:
    curves, reason = _curves(level, classes, found, "average_precision")
    for colour, label, curve, share in curves:
        at, precision = curve.recall, curve.precision
        panel.plot(at, precision, color=colour, lw=1.6, label=label, drawstyle="steps-pre")
        panel.axhline(share, color=colour, lw=0.8, ls=":")
    if not reason:
        panel.plot([], [], color="0.4", lw=0.8, ls=":", label="chance: share of the class")
    x, y = "recall (sensitivity)", "precision (positive predictive value)"
    _finish(panel, x, y, "lower left", not reason, "average precision")
    return reason


def _curves(
    level: Level, classes: Sequence[str], found: Sequence[Measured], metric: str
) -> tuple[list[tuple[Any, str, Curve, float]], str]:
    """Colour, label, curve and share of the class of each class to draw; why there is none."""
    curves, reason = [], _UNDEFINED
    numbers = range(min(len(classes), _MOST_CURVES))
    if level.task == "classification" and len(classes) == 2:
        numbers = range(1, 2)  # the other class has the mirrored curve
    for k in numbers:
        if level.task == "classification":
            scores, positive = level.values[:, k], level.truth == k
        else:
            known = ~np.isnan(level.truth[:, k])
            scores, positive = level.values[known, k], level.truth[known, k] > 0.5
        curve = Ranking(scores, positive, np.zeros(len(positive), np.int64)).curve()
        if curve is not None:
            few = _too_few(level, positive)
            reason = reason and few
            if not few:
                label = f"{fitted(classes[k], _LONGEST)}: {_value(found, metric, classes[k])}"
                curves.append((colours_of([k])[0], label, curve, float(positive.mean())))
    return curves, reason


def _too_few(level: Level, positive: npt.NDArray[np.bool_]) -> str:
    """Why a curve would mislead; empty if it would not."""
    counts = int(positive.sum()), int((~positive).sum())
    if min(counts) >= FEW:
        return ""
    return (
        f"{counts[0]} {level.name}s of the class, {counts[1]} of others:\n"
        f"not drawn with fewer than {FEW} of each"
    )


def _value(found: Sequence[Measured], metric: str, name: str) -> str:
    return next((shown_value(o) for o in found if (o.metric, o.name) == (metric, name)), "-")


def _finish(panel: Any, x: str, y: str, place: str, labelled: bool, title: str = "") -> None:
    panel.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    style_axes(panel, x, y)
    if labelled:
        panel.legend(fontsize=SMALL, loc=place, framealpha=0.85, title=title, title_fontsize=SMALL)


# --- calibration


def _draw_bins(panel: Any, level: Level, classes: Sequence[str], found: Sequence[Measured]) -> str:
    """Draw a reliability diagram, with the share of samples per bin."""
    if level.task == "classification":
        confidence = level.values.max(1)
        right = level.values.argmax(1) == level.truth
        x, y = "confidence of the predicted class", "accuracy"
    else:
        known = ~np.isnan(level.truth)
        confidence, right = level.values[known], level.truth[known] > 0.5
        x, y = "probability of a class", "observed frequency"
    if len(confidence) < 2 * FEW:
        _finish(panel, x, y, "best", labelled=False)
        return f"{len(confidence)} {level.name}s:\nnot drawn with fewer than {2 * FEW}"
    at = np.minimum(bins_of(confidence), BINS - 1)
    counts = np.bincount(at, minlength=BINS)
    there = counts > 0
    means = np.bincount(at, confidence, BINS)[there] / counts[there]
    shares = np.bincount(at, right, BINS)[there] / counts[there]
    panel.plot([0, 1], [0, 1], color="0.6", lw=1, ls="--", label="perfect calibration")
    edges = np.linspace(0, 1, BINS + 1)
    bars = counts / counts.sum() * 0.25  # at the bottom, at most a quarter of the height
    panel.bar(
        edges[:-1],
        bars,
        1 / BINS,
        align="edge",
        color="#c9d6e6",
        label="share of samples, 1/4 as high",
    )
    error = next((shown_value(o) for o in found if o.metric == "calibration_error"), None)
    label = "by bin" if error is None else f"calibration error {error}"
    panel.plot(means, shares, "o-", color=colours_of([0])[0], lw=1.4, ms=4, label=label)
    _finish(panel, x, y, "best", labelled=True)
    return ""


# --- confusion


def _draw_confusion(
    panel: Any, level: Level, classes: Sequence[str], found: Sequence[Measured]
) -> str:
    scores: Any = level.scores()
    draw_confusion(panel, scores.confusion(np.ones((1, scores.units)))[0], classes)
    return ""


def _draw_dice(panel: Any, level: Level, classes: Sequence[str], found: Sequence[Measured]) -> str:
    """Draw a point per image, and the mean of each class with its interval."""
    scores = level.scores()
    assert isinstance(scores, PixelScores)
    dice = scores.of_images["dice"]
    rng = np.random.default_rng(0)
    for k, name in enumerate(classes):
        known = dice[:, k][~np.isnan(dice[:, k])]
        spread = k + rng.uniform(-0.2, 0.2, len(known))
        panel.scatter(spread, known, s=12, alpha=0.6, color=colours_of([k]))
        one = next(o for o in found if (o.metric, o.name) == ("image_dice", name))
        panel.hlines(one.estimate, k - 0.3, k + 0.3, color="0.2", lw=1.6)
        panel.vlines(k + 0.3, *one.interval, color="0.2", lw=1.6)
    panel.set_xticks(range(len(classes)), [fitted(n, 14) for n in classes], rotation=35, ha="right")
    least = np.floor(10 * np.nanmin(dice, initial=0.9)) / 10
    panel.set_ylim(least - 0.02, 1.02)
    style_axes(panel, "", "Dice (line: mean, bar: its interval)", "y")
    return "" if np.isfinite(dice).any() else _UNDEFINED


def image_errors(pixels: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """(images,): 1 - the mean Dice of each image."""
    return 1 - from_confusion(pixels.astype(np.float64))["mean_dice"]


# --- numbers


def _draw_numbers(
    panel: Any, level: Level, classes: Sequence[str], found: Sequence[Measured], number: int
) -> str:
    """Draw predictions of one target over the true values."""
    step = max(1, len(level) // _MOST_POINTS)
    truth, values = level.truth[::step, number], level.values[::step, number]
    style_axes(panel, "target", "predicted")
    if np.isnan(truth).all():
        return _UNDEFINED
    draw_numbers(panel, truth, values, number)
    text = f"R2 {_value(found, 'r2', classes[0])}"
    panel.text(0.03, 0.97, text, fontsize=SMALL, va="top", transform=panel.transAxes)
    return ""


# --- survival


def _draw_survival(
    panel: Any, level: Level, classes: Sequence[str], found: Sequence[Measured]
) -> str:
    """Draw a curve per half of higher and lower risk, with a tick at each censoring."""
    risks, times, events = level.values[:, 0], level.truth[:, 0], level.truth[:, 1] == 1
    if not events.any():
        return "no event"
    is_high = risks > np.median(risks)
    halves = {"lower risk": ~is_high, "higher risk": is_high}
    for colour, (name, chosen) in zip(colours_of(range(2)), halves.items(), strict=True):
        if chosen.any():
            _draw_half(panel, times[chosen], events[chosen], name, colour)
    value = next((one for one in found if one.metric == "c_index"), None)
    title = "" if value is None else f"concordance index {value.estimate:.3f}"
    if value is not None and not np.isnan(value.interval.low):
        title += f" [{value.interval.low:.3f}, {value.interval.high:.3f}]"
    panel.set(xlim=(0, float(times.max()) * 1.02 or 1), ylim=(-0.02, 1.02))
    style_axes(panel, classes[0], "share without an event")
    panel.legend(fontsize=SMALL, loc="best", framealpha=0.85, title=title, title_fontsize=SMALL)
    return ""


def _draw_half(
    panel: Any, times: Floats, events: npt.NDArray[np.bool_], name: str, colour: Any
) -> None:
    """Draw the estimate of Kaplan and Meier, J. Am. Stat. Assoc. 53, 1958."""
    ends = times[~events]
    found = stats.ecdf(stats.CensoredData(uncensored=times[events], right=ends)).sf
    x, y = np.r_[0.0, found.quantiles], np.r_[1.0, found.probabilities]
    label = f"{name} ({len(times):,}, {int(events.sum()):,} events)"
    panel.plot(x, y, color=colour, lw=1.6, drawstyle="steps-post", label=label)
    panel.plot(ends, found.evaluate(ends), "|", color=colour, ms=5, mew=0.8)
