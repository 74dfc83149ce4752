"""Ridge regression of numbers or classes of slides: `spatialdl-analyze ridge`."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.common.files import save_table
from spatialdl.data.feature_file import FeatureFile
from spatialdl.inference.analysis.cohort import Cohort, Columns
from spatialdl.inference.analysis.ridge import Ridge, RidgeClassifierCV, RidgeCV
from spatialdl.inference.analysis.rows import load_model, save_model
from spatialdl.inference.evaluating.measured import point
from spatialdl.inference.evaluating.scores import NumberScores, from_confusion
from spatialdl.inference.predicting.loop import agreeing
from spatialdl.inference.predicting.pictures import (
    TITLE,
    confusion_side,
    draw_confusion,
    draw_numbers,
    new_figure,
    save_figure,
    style_axes,
)

Numbers = npt.NDArray[np.float64]


Values = dict[str, Any]
"""Numbers or classes by slide."""
Table = dict[str, Values]
"""Results by column: `predicted`, and scores of classes."""


def regress(options: argparse.Namespace, cohort: Cohort) -> dict[str, Any]:
    """Fit or apply a ridge regression of slides; writes tables and a picture."""
    model: Any = None
    with agreeing(cohort.comm):
        if options.apply:
            model = _loaded(options, cohort)
        is_class = options.classes or isinstance(model, RidgeClassifierCV)
        targets, groups = _labels(options, cohort, is_class)
    filled = [file for file in cohort.files if file.tiles]
    with cohort.rows(filled) as rows:
        means = cohort.slide_means(rows, filled)
    held_out: Table = {}
    summary: dict[str, Any] = {}
    if model is None:
        model, held_out, summary = _learned(options, cohort, filled, means, targets, groups)
    predicted = _by_slide([file.slide for file in filled], _columns(model, means))
    cohort.write_tables(options.out / "tiles", lambda of_slide: _columns(model, of_slide))
    shown = (held_out or predicted)["predicted"]
    both = [(targets[name], shown[name]) for name in shown if name in targets]
    if is_class and both:
        scores = from_confusion(_pairs(both)[1][None].astype(np.float64))
        summary |= {name: float(scores[name][0]) for name in ("accuracy", "balanced_accuracy")}
    elif len(both) > 1:
        true, found = np.array(both).T[..., None]
        numbers = NumberScores(found, true, np.arange(len(both)))
        summary["r2_of_slides"] = float(point(numbers)["r2"])
    with agreeing(cohort.comm):
        if cohort.comm.rank == 0:
            _save_slides(options, cohort, targets, predicted, held_out)
            if len(both) > 1:
                _draw(options, both, is_class, summary)
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


def _by_slide(slides: list[str], results: Columns) -> Table:
    return {
        column: dict(zip(slides, values.tolist(), strict=True))
        for column, values in results.items()
    }


def _pairs(both: list[tuple[str, str]]) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Class names, and the confusion matrix by true and predicted class."""
    names = sorted({str(name) for pair in both for name in pair})
    pairs = np.zeros((len(names), len(names)), np.int64)
    np.add.at(pairs, tuple(np.searchsorted(names, np.array(both).T)), 1)
    return names, pairs


def _labels(options: argparse.Namespace, cohort: Cohort, is_class: bool) -> tuple[Values, Values]:
    """Targets of the slides in the table, and their groups: without --group the slides."""
    if options.labels is None:
        return {}, {}
    columns = [options.target, *([options.group] if options.group else [])]
    table = cohort.read_columns(options.labels, columns)
    texts = {name: row[options.target] for name, row in table.items() if options.target in row}
    targets: Values = dict(texts)
    for slide, text in {} if is_class else texts.items():
        targets[slide] = value = _number(text)
        if not np.isfinite(value):
            raise ValueError(
                f"{options.labels}: {options.target} of slide {slide!r} is {text!r}, expected a "
                "finite number (for classes, use --classes)"
            )
    if not is_class and not targets:
        raise ValueError(
            f"{options.labels}: column {options.target} is empty for all slides with features"
        )
    return targets, {name: table[name].get(options.group, name) for name in targets}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _loaded(options: argparse.Namespace, cohort: Cohort) -> Any:
    kinds = (Ridge, RidgeCV, RidgeClassifierCV)
    model = load_model(options.apply, kinds, "ridge")
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
    targets: Values,
    groups: Values,
) -> tuple[RidgeCV, Table, dict[str, Any]]:
    """Fit a model; returns it, held-out predictions of the slides, and entries of the summary."""
    comm = cohort.comm
    known = [k for k, file in enumerate(filled) if file.slide in targets]
    files, of_slides = [filled[k] for k in known], means[known]
    if len(files) < 3:
        raise ValueError(
            f"{len(files)} slides with features have a {'class' if options.classes else 'number'} "
            f"in {options.target}, expected at least 3"
        )
    names = [file.slide for file in files]
    kind = RidgeClassifierCV if options.classes else RidgeCV
    model = kind(options.alphas, cv=options.folds, comm=comm)
    rows: AbstractContextManager[Any] = cohort.rows(files)
    if options.level == "slide":
        first, last = (len(files) * (comm.rank + k) // comm.size for k in (0, 1))
        own, rows = names[first:last], nullcontext(of_slides[first:last])
    else:
        own = [part.file.slide for part in cohort.parts(files) for _ in range(part.tiles)]
    with rows as given:
        of_rows = np.array([groups[name] for name in own], str)
        model.fit(given, [targets[name] for name in own], of_rows)
    folds: dict[str, int] = {}
    for of_rank in comm.allgather(dict(zip(own, model.folds_.tolist(), strict=True))):
        folds |= of_rank
    predicted: Table = {}
    for fold in sorted(set(folds.values())):
        inside = [k for k, name in enumerate(names) if folds[name] == fold]
        part = _columns(model.without(fold), of_slides[inside])
        for column, cells in _by_slide([names[k] for k in inside], part).items():
            predicted.setdefault(column, {}).update(cells)
    with agreeing(comm):
        if comm.rank == 0:
            save_model(options.out / "model.npz", model)
    return model, predicted, {"alpha": model.alpha_, "folds": options.folds}


def _save_slides(
    options: argparse.Namespace, cohort: Cohort, targets: Values, predicted: Table, held_out: Table
) -> None:
    scores = {**(held_out or predicted)}
    scores.pop("predicted")
    columns = {
        "true": targets,
        "predicted_held_out": held_out.get("predicted", {}),
        "predicted": predicted["predicted"],
        **scores,
    }
    lines = [
        [f.slide, f.tiles, *(_text(values, f.slide) for values in columns.values())]
        for f in cohort.files
    ]
    save_table(options.out / "slides.csv", ["slide", "tiles", *columns], lines)


def _draw(
    options: argparse.Namespace,
    both: list[tuple[Any, Any]],
    is_class: bool,
    summary: dict[str, Any],
) -> None:
    how = f"{options.folds} folds, each slide held out"
    if options.apply:
        how = f"{options.apply.name}"
    target = options.target
    side = confusion_side(len(_pairs(both)[0])) if is_class else 5.0
    figure = new_figure(side, side)
    panel = figure.subplots()
    if is_class:
        names, pairs = _pairs(both)
        score = f"accuracy {100 * summary['accuracy']:.1f} %"
        draw_confusion(panel, pairs, names, target)
    else:
        score = f"R2 = {summary['r2_of_slides']:.3f}"
        draw_numbers(panel, np.array(both)[:, 0], np.array(both)[:, 1])
        style_axes(panel, f"{target}, true", f"{target}, predicted")
    panel.set_title(f"{len(both)} slides, {score}\n{how}", fontsize=TITLE)
    save_figure(options.out / "predicted.png", figure)


def _text(values: dict[str, Any], name: str) -> str:
    value = values.get(name, "")
    return f"{value:.6g}" if isinstance(value, float) else value
