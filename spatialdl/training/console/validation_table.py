"""The table of a validation: all metrics, those of the classes, who was taken for whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spatialdl.text import aligned, counted, fitted

SHARES = (
    *("accuracy", "balanced_accuracy", "auroc", "f1", "mean_dice", "mean_iou"),
    *("slide_accuracy", "slide_balanced_accuracy", "slide_auroc", "slide_f1"),
    "slide_vote_accuracy",
)
"""Metrics between 0 and 1, told in percent."""

_OF_CLASSES = {
    **{"recall_per_class": "recall", "f1_per_class": "F1", "auroc_per_class": "AUROC"},
    **{"balanced_accuracy_per_class": "balanced accuracy", "dice": "Dice", "iou": "IoU"},
    **{"mae_per_target": "MAE", "rmse_per_target": "RMSE", "r2_per_target": "R2"},
}
_NO_METRICS = ("samples", "slides", "step")
_LONGEST = 24  # columns of a class's name
_MOST_CLASSES = 20
_MOST_CONFUSED = 10  # classes, up to which pairs are shown


def validation_table(
    found: Mapping[str, Any], step: int, names: Sequence[str], before: Mapping[str, Any] | None
) -> str:
    """The lines of the table.

    Args:
        found: the metrics.
        step: number of optimizer steps made.
        names: of the classes or targets.
        before: metrics of the validation before, if there was one.
    """
    lines = [f"validation after step {step}, {counted(found['samples'], 'sample')}"]
    lines += [f"  {line}" for line in aligned(list(_metrics(found, before)))]
    for part in (class_rows(found, names), confusion_rows(found, names)):
        if part:
            lines += ["", *(f"  {line}" for line in aligned(part))]
    return "\n".join(lines)


def _metrics(found: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[list[str]]:
    if before is not None:
        yield ["", "now", "before"]
    for name, value in metrics_of(found).items():
        row = [told_name(name), told_value(name, value)]
        yield row if before is None else [*row, told_value(name, before.get(name))]


def metrics_of(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Those that are one number, or None."""
    return {
        name: value
        for name, value in found.items()
        if not isinstance(value, list) and name not in _NO_METRICS
    }


def told_name(name: str) -> str:
    """ "mean Dice" for "mean_dice"."""
    words = {"dice": "Dice", "iou": "IoU", "auroc": "AUROC", "f1": "F1", "mae": "MAE"}
    words |= {"rmse": "RMSE", "r2": "R2"}
    return " ".join(words.get(word, word) for word in name.split("_"))


def told_value(name: str, value: float | None) -> str:
    """With its unit; "-" where there is none."""
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if name in SHARES else f"{value:.4g}"


def class_rows(found: Mapping[str, Any], names: Sequence[str]) -> list[list[str]]:
    """A row a class or target below a head; nothing if no metric is told by class."""
    columns = {name: found[name] for name in _OF_CLASSES if found.get(name)}
    columns |= {name: values for name, values in found.items() if _is_own(name, values)}
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
    """Whether it is a metric of the user's that has several values, such as one a class."""
    is_known = name in _OF_CLASSES or name in ("confusion_matrix", "step")
    return not is_known and isinstance(values, list) and bool(values)


def _cell(name: str, value: float | None) -> str:
    share = name in _OF_CLASSES and not name.endswith("_per_target")
    return "-" if value is None else f"{100 * value:.1f} %" if share else f"{value:.4g}"


def confusion_rows(found: Mapping[str, Any], names: Sequence[str]) -> list[list[str]]:
    """A row a true class, a column a predicted one; of few classes, and one label a sample."""
    pairs = found.get("confusion_matrix") or []
    if not 0 < len(pairs) <= _MOST_CONFUSED or isinstance(pairs[0][0], list):
        return []
    columns = len(pairs[0])
    if columns > len(pairs) and not any(sum(row[len(pairs) :]) for row in pairs):
        columns = len(pairs)  # no sample was predicted to be of none
    head = ["true \\ predicted", *(_class(n, names) for n in range(columns))]
    rows = [[f"{count:,}" for count in row[:columns]] for row in pairs]
    return [head, *([_class(n, names), *row] for n, row in enumerate(rows))]


def _class(number: int, names: Sequence[str]) -> str:
    return fitted(names[number], _LONGEST) if number < len(names) else str(number)
