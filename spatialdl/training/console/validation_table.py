"""Console table of a validation: metrics, metrics per class, confusion matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spatialdl.common.text import aligned, counted, fitted

SHARES = (
    *("accuracy", "balanced_accuracy", "auroc", "f1", "mean_dice", "mean_iou"),
    *("slide_accuracy", "slide_balanced_accuracy", "slide_auroc", "slide_f1"),
    "slide_vote_accuracy",
)
"""Metrics between 0 and 1, printed in percent."""

_OF_CLASSES = {
    **{"recall_per_class": "recall", "f1_per_class": "F1", "auroc_per_class": "AUROC"},
    **{"balanced_accuracy_per_class": "balanced accuracy", "dice": "Dice", "iou": "IoU"},
    **{"mae_per_target": "MAE", "rmse_per_target": "RMSE", "r2_per_target": "R2"},
}
_NO_METRICS = ("samples", "slides", "step")
_LONGEST = 24  # characters of a class name
_MOST_CLASSES = 20
_MOST_CONFUSED = 10  # classes of the largest confusion matrix that is printed


def validation_table(
    metrics: Mapping[str, Any], step: int, names: Sequence[str], before: Mapping[str, Any] | None
) -> str:
    """Format the metrics of a validation.

    Args:
        metrics: metrics by name.
        step: optimizer steps so far.
        names: class or target names.
        before: metrics of the previous validation, if any.
    """
    lines = [f"validation after step {step}, {counted(metrics['samples'], 'sample')}"]
    lines += [f"  {line}" for line in aligned(list(_metrics(metrics, before)))]
    for part in (class_rows(metrics, names), confusion_rows(metrics, names)):
        if part:
            lines += ["", *(f"  {line}" for line in aligned(part))]
    return "\n".join(lines)


def _metrics(metrics: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[list[str]]:
    if before is not None:
        yield ["", "now", "before"]
    for name, value in scalar_metrics(metrics).items():
        row = [metric_label(name), metric_text(name, value)]
        yield row if before is None else [*row, metric_text(name, before.get(name))]


def scalar_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Select the metrics that are a single number or None."""
    return {
        name: value
        for name, value in metrics.items()
        if not isinstance(value, list) and name not in _NO_METRICS
    }


def metric_label(name: str) -> str:
    """Readable name of a metric, "mean Dice" for "mean_dice"."""
    words = {"dice": "Dice", "iou": "IoU", "auroc": "AUROC", "f1": "F1", "mae": "MAE"}
    words |= {"rmse": "RMSE", "r2": "R2"}
    return " ".join(words.get(word, word) for word in name.split("_"))


def metric_text(name: str, value: float | None) -> str:
    """Format a value with its unit; "-" if it is undefined."""
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if name in SHARES else f"{value:.4g}"


def class_rows(metrics: Mapping[str, Any], names: Sequence[str]) -> list[list[str]]:
    """Header and one row per class or target; empty without metrics per class."""
    columns = {name: metrics[name] for name in _OF_CLASSES if metrics.get(name)}
    columns |= {name: values for name, values in metrics.items() if _is_own(name, values)}
    if not columns:
        return []
    rows = [["", *(_OF_CLASSES.get(name, name) for name in columns)]]
    count = max(map(len, columns.values()))
    for number in range(min(count, _MOST_CLASSES)):
        cells = [
            _cell(name, values[number] if number < len(values) else None)
            for name, values in columns.items()
        ]
        rows.append([_class(number, names), *cells])
    if count > _MOST_CLASSES:
        rows.append([f"... {count - _MOST_CLASSES} more", *([""] * len(columns))])
    return rows


def _is_own(name: str, values: Any) -> bool:
    """Whether a user's metric has several values, such as one per class."""
    is_known = name in _OF_CLASSES or name in ("confusion_matrix", "step")
    return not is_known and isinstance(values, list) and bool(values)


def _cell(name: str, value: float | None) -> str:
    share = name in _OF_CLASSES and not name.endswith("_per_target")
    return "-" if value is None else f"{100 * value:.1f} %" if share else f"{value:.4g}"


def confusion_rows(metrics: Mapping[str, Any], names: Sequence[str]) -> list[list[str]]:
    """Header and one row per true class, one column per predicted class.

    Empty for more than 10 classes or several labels per sample.
    """
    pairs = metrics.get("confusion_matrix") or []
    if not 0 < len(pairs) <= _MOST_CONFUSED or isinstance(pairs[0][0], list):
        return []
    columns = len(pairs[0])
    if columns > len(pairs) and not any(sum(row[len(pairs) :]) for row in pairs):
        columns = len(pairs)  # the column for "no class" is empty
    head = ["true \\ predicted", *(_class(n, names) for n in range(columns))]
    rows = [[f"{count:,}" for count in row[:columns]] for row in pairs]
    return [head, *([_class(n, names), *row] for n, row in enumerate(rows))]


def _class(number: int, names: Sequence[str]) -> str:
    return fitted(names[number], _LONGEST) if number < len(names) else str(number)
