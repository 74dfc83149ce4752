"""Numbers of slides predicted from their features: `spatialdl-analyze ridge`."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.analysis import pictures
from spatialdl.analysis.cohort import Cohort, Columns
from spatialdl.analysis.columns import numbers_of, read_columns
from spatialdl.analysis.ridge import MSE, Ridge, RidgeCV
from spatialdl.analysis.rows import FileRows
from spatialdl.analysis.saved_models import load_model, save_model
from spatialdl.data.feature_file import FeatureFile
from spatialdl.data.saving import save_table

Numbers = npt.NDArray[np.float64]


class _Labels(NamedTuple):
    """What the table says of slides that have a line.

    Attributes:
        target: by slide.
        group: by slide, the slide itself where no group is asked for.
    """

    target: dict[str, float]
    group: dict[str, str]


def regress(options: argparse.Namespace, cohort: Cohort) -> dict[str, Any]:
    """A ridge regression of slides: tables of slides and tiles, predicted over true values."""
    ranks = cohort.ranks
    labels = ranks.together(lambda: _labels(options, cohort))
    filled = [file for file in cohort.files if file.tiles]
    with cohort.rows(filled) as rows:
        means = cohort.slide_means(rows, filled)
    held_out: dict[str, float] = {}
    if options.apply is not None:
        model = ranks.together(lambda: _loaded(options, cohort))
        summary: dict[str, Any] = {}
    else:
        model, held_out, summary = _learned(options, cohort, filled, means, labels)

    def columns(of_slide: FileRows) -> Columns:
        return {"predicted": model.predict(of_slide)}

    predicted = {f.slide: float(p) for f, p in zip(filled, model.predict(means), strict=True)}
    cohort.write_tables(options.out / "tiles", columns)
    ranks.on_first(lambda: _write(options, cohort, labels, predicted, held_out))
    seen = held_out or predicted
    both = [(labels.target[name], seen[name]) for name in seen if name in labels.target]
    if len(both) > 1:
        summary["r2_of_slides"] = _r2(*np.array(both).T)
    return {"slides_compared": len(both), **summary}


def _labels(options: argparse.Namespace, cohort: Cohort) -> _Labels:
    if options.labels is None:
        return _Labels({}, {})
    slides = [file.slide for file in cohort.files]
    columns = [options.target, *([options.group] if options.group else [])]
    table = read_columns(options.labels, slides, columns)
    target = numbers_of(options.labels, table, options.target)
    group = {name: table[name].get(options.group, name) for name in target}
    return _Labels(target, group)


def _loaded(options: argparse.Namespace, cohort: Cohort) -> Any:
    model = load_model(options.apply, device=options.device)
    if not isinstance(model, Ridge | RidgeCV):
        raise ValueError(f"{options.apply} is a {type(model).__name__}, expected a ridge model")
    if model.n_features_in_ != cohort.width or model.coef_.ndim != 1:
        raise ValueError(
            f"{options.apply} was fitted on features of {model.n_features_in_} numbers and "
            f"{model.coef_.size // model.n_features_in_} targets; these have {cohort.width}, and 1"
        )
    return model


def _learned(
    options: argparse.Namespace,
    cohort: Cohort,
    filled: list[FeatureFile],
    means: Numbers,
    labels: _Labels,
) -> tuple[RidgeCV, dict[str, float], dict[str, Any]]:
    """The model, what models that have not seen a slide predict for it, and what was found."""
    ranks = cohort.ranks
    known = [k for k, file in enumerate(filled) if file.slide in labels.target]
    files, of_slides = [filled[k] for k in known], means[known]
    if len(files) < 3:
        raise ValueError(
            f"{len(files)} slides with features have a number in {options.target}, expected at "
            "least 3"
        )
    names = [file.slide for file in files]
    model = RidgeCV(
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
    predicted = {
        name: float((model.fold_coef_[folds[name]] @ mean + model.fold_intercept_[folds[name]])[0])
        for name, mean in zip(names, of_slides, strict=True)
    }
    ranks.on_first(lambda: save_model(options.out / "model.npz", model))
    return model, predicted, {"alpha": model.alpha_, "folds": options.folds}


def _of(values: dict[str, Any], names: list[str]) -> list[Any]:
    return [values[name] for name in names]


def _write(
    options: argparse.Namespace,
    cohort: Cohort,
    labels: _Labels,
    predicted: dict[str, float],
    held_out: dict[str, float],
) -> None:
    head = ["slide", "tiles", "true", "predicted_held_out", "predicted"]

    def text(values: dict[str, float], name: str) -> str:
        return f"{values[name]:.6g}" if name in values else ""

    lines = [
        [
            f.slide,
            f.tiles,
            *(text(values, f.slide) for values in (labels.target, held_out, predicted)),
        ]
        for f in cohort.files
    ]
    save_table(options.out / "slides.csv", head, lines)
    seen = held_out or predicted
    both = np.array([(labels.target[name], seen[name]) for name in seen if name in labels.target])
    if len(both) < 2:
        return
    how = f"{options.folds} folds, each slide held out" if held_out else f"{options.apply.name}"
    title = f"{len(both)} slides, R2 = {_r2(*both.T):.3f}\n{how}"
    pictures.draw_regression(
        options.out / "predicted.png", both[:, 0], both[:, 1], options.target, title
    )


def _r2(true: Numbers, predicted: Numbers) -> float:
    whole = float(np.square(true - true.mean()).sum())
    return 1 - float(np.square(true - predicted).sum()) / whole if whole else float("nan")
