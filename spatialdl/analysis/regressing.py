"""Ridge regression of numbers or classes of slides: `spatialdl-analyze ridge`."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.analysis import pictures
from spatialdl.analysis.cohort import Cohort, Columns
from spatialdl.analysis.columns import numbers_of, read_columns
from spatialdl.analysis.ridge import MSE, Ridge, RidgeCV
from spatialdl.analysis.ridge_classes import RidgeClassifierCV
from spatialdl.analysis.saved_models import load_model, save_model
from spatialdl.data.feature_file import FeatureFile
from spatialdl.data.saving import save_table

Numbers = npt.NDArray[np.float64]


class _Labels(NamedTuple):
    """Labels of the slides in the table.

    Attributes:
        target: number or class, by slide.
        group: group, by slide; the slide itself without --group.
    """

    target: dict[str, Any]
    group: dict[str, str]


class _Predicted(NamedTuple):
    """Predictions of slides.

    Attributes:
        values: predicted number or class, by slide.
        columns: scores of classes, by column and slide; empty for numbers.
    """

    values: dict[str, Any]
    columns: dict[str, dict[str, float]]


def regress(options: argparse.Namespace, cohort: Cohort) -> dict[str, Any]:
    """Fit or apply a ridge regression of slides; writes tables and a picture."""
    ranks = cohort.ranks
    model: Any = ranks.together(lambda: _loaded(options, cohort)) if options.apply else None
    is_class = options.classes or isinstance(model, RidgeClassifierCV)
    labels = ranks.together(lambda: _labels(options, cohort, is_class))
    filled = [file for file in cohort.files if file.tiles]
    with cohort.rows(filled) as rows:
        means = cohort.slide_means(rows, filled)
    held_out: _Predicted | None = None
    summary: dict[str, Any] = {}
    if model is None:
        model, held_out, summary = _learned(options, cohort, filled, means, labels)
    slides = [file.slide for file in filled]
    predicted = _by_slide(slides, _columns(model, means))
    cohort.write_tables(options.out / "tiles", lambda of_slide: _columns(model, of_slide))
    shown = held_out or predicted
    ranks.on_first(lambda: _write(options, cohort, labels, predicted, held_out))
    both = _compared(labels, shown)
    if is_class and both:
        summary |= _shares(both)
    elif len(both) > 1:
        summary["r2_of_slides"] = _r2(*np.array(both).T)
    return {"slides_compared": len(both), **summary}


def _columns(model: Any, rows: Any) -> Columns:
    """Result columns of rows: `predicted`, and scores of classes."""
    if not isinstance(model, RidgeClassifierCV):
        return {"predicted": model.predict(rows)}
    decisions = model.decision_function(rows)
    several = np.atleast_2d(decisions.T)
    names = model.classes_.tolist()[-len(several) :]  # for two classes, the second only
    scores = {f"score_{name}": values for name, values in zip(names, several, strict=True)}
    return {"predicted": model.decide(decisions), **scores}


def _by_slide(slides: list[str], results: Columns) -> _Predicted:
    def of(column: str) -> dict[str, Any]:
        return dict(zip(slides, results[column].tolist(), strict=True))

    return _Predicted(of("predicted"), {name: of(name) for name in results if name != "predicted"})


def _compared(labels: _Labels, shown: _Predicted) -> list[tuple[Any, Any]]:
    """True and predicted values of labelled slides."""
    known = [name for name in shown.values if name in labels.target]
    return [(labels.target[name], shown.values[name]) for name in known]


def _shares(both: list[tuple[str, str]]) -> dict[str, float]:
    """Accuracy and balanced accuracy (mean recall of the classes)."""
    true, predicted = (np.array(values) for values in zip(*both, strict=True))
    right = true == predicted
    recalls = [float(right[true == name].mean()) for name in np.unique(true)]
    return {"accuracy": float(right.mean()), "balanced_accuracy": float(np.mean(recalls))}


def _labels(options: argparse.Namespace, cohort: Cohort, is_class: bool) -> _Labels:
    if options.labels is None:
        return _Labels({}, {})
    slides = [file.slide for file in cohort.files]
    columns = [options.target, *([options.group] if options.group else [])]
    table = read_columns(options.labels, slides, columns)
    target: dict[str, Any] = (
        {name: row[options.target] for name, row in table.items() if options.target in row}
        if is_class
        else numbers_of(options.labels, table, options.target)
    )
    group = {name: table[name].get(options.group, name) for name in target}
    return _Labels(target, group)


def _loaded(options: argparse.Namespace, cohort: Cohort) -> Any:
    model = load_model(options.apply, device=options.device)
    if not isinstance(model, Ridge | RidgeCV):
        raise ValueError(f"{options.apply} is a {type(model).__name__}, expected a ridge model")
    is_class = isinstance(model, RidgeClassifierCV)
    if options.classes and not is_class:
        raise ValueError(f"{options.apply} predicts a number: remove --classes")
    if model.n_features_in_ != cohort.width or (model.coef_.ndim != 1 and not is_class):
        raise ValueError(
            f"{options.apply} was fitted on {model.n_features_in_} features and "
            f"{model.coef_.size // model.n_features_in_} targets; expected {cohort.width} features "
            "and 1 target"
        )
    return model


def _learned(
    options: argparse.Namespace,
    cohort: Cohort,
    filled: list[FeatureFile],
    means: Numbers,
    labels: _Labels,
) -> tuple[RidgeCV, _Predicted, dict[str, Any]]:
    """Fit a model; returns it, held-out predictions of the slides, and entries of the summary."""
    ranks = cohort.ranks
    known = [k for k, file in enumerate(filled) if file.slide in labels.target]
    files, of_slides = [filled[k] for k in known], means[known]
    if len(files) < 3:
        raise ValueError(
            f"{len(files)} slides with features have a {'class' if options.classes else 'number'} "
            f"in {options.target}, expected at least 3"
        )
    names = [file.slide for file in files]
    kind = RidgeClassifierCV if options.classes else RidgeCV
    model = kind(
        options.alphas, cv=options.folds, scoring=MSE, comm=ranks.comm, device=options.device
    )
    if options.level == "slide":
        first, last = (len(files) * (ranks.rank + k) // ranks.size for k in (0, 1))
        own, values = names[first:last], of_slides[first:last]
        model.fit(values, _of(labels.target, own), np.array(_of(labels.group, own), str))
    else:
        own = [part.file.slide for part in cohort.parts(files) for _ in range(part.tiles)]
        with cohort.rows(files) as rows:
            model.fit(rows, _of(labels.target, own), np.array(_of(labels.group, own), str))
    every = [
        one
        for of in ranks.comm.allgather(dict(zip(own, model.folds_.tolist(), strict=True)))
        for one in of.items()
    ]
    folds = dict(every)
    predicted = _Predicted({}, {})
    for fold in sorted(set(folds.values())):
        inside = [k for k, name in enumerate(names) if folds[name] == fold]
        part = _by_slide(
            [names[k] for k in inside], _columns(model.without(fold), of_slides[inside])
        )
        predicted.values.update(part.values)
        for column, cells in part.columns.items():
            predicted.columns.setdefault(column, {}).update(cells)
    ranks.on_first(lambda: save_model(options.out / "model.npz", model))
    return model, predicted, {"alpha": model.alpha_, "folds": options.folds}


def _of(values: dict[str, Any], names: list[str]) -> list[Any]:
    return [values[name] for name in names]


def _write(
    options: argparse.Namespace,
    cohort: Cohort,
    labels: _Labels,
    predicted: _Predicted,
    held_out: _Predicted | None,
) -> None:
    shown = held_out or predicted
    columns = {
        "true": labels.target,
        "predicted_held_out": held_out.values if held_out else {},
        "predicted": predicted.values,
        **shown.columns,
    }
    lines = [
        [f.slide, f.tiles, *(_text(values, f.slide) for values in columns.values())]
        for f in cohort.files
    ]
    save_table(options.out / "slides.csv", ["slide", "tiles", *columns], lines)
    both = _compared(labels, shown)
    if len(both) < 2:
        return
    how = f"{options.folds} folds, each slide held out" if held_out else f"{options.apply.name}"
    path, target = options.out / "predicted.png", options.target
    if predicted.columns:
        names = sorted({str(name) for pair in both for name in pair})
        pairs = np.zeros((len(names), len(names)), np.int64)
        np.add.at(pairs, tuple(np.searchsorted(names, np.array(both).T)), 1)
        accuracy = 100 * pairs.trace() / len(both)
        title = f"{len(both)} slides, accuracy {accuracy:.1f} %\n{how}"
        pictures.draw_confusion(path, pairs, names, target, title)
        return
    numbers = np.array(both)
    title = f"{len(both)} slides, R2 = {_r2(*numbers.T):.3f}\n{how}"
    pictures.draw_regression(path, numbers[:, 0], numbers[:, 1], target, title)


def _text(values: dict[str, Any], name: str) -> str:
    value = values.get(name, "")
    return f"{value:.6g}" if isinstance(value, float) else value


def _r2(true: Numbers, predicted: Numbers) -> float:
    whole = float(np.square(true - true.mean()).sum())
    return 1 - float(np.square(true - predicted).sum()) / whole if whole else float("nan")
