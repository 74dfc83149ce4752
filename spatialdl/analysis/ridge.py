"""Ridge regression on rows divided over ranks, by normal equations."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from spatialdl.analysis import normal_equations
from spatialdl.analysis.estimator import Array, Estimator, numpy, positive
from spatialdl.analysis.normal_equations import Fit, Sums
from spatialdl.analysis.ranks import Comm
from spatialdl.analysis.rows import DividedRows

R2, MSE = "r2", "neg_mean_squared_error"


class _Linear(Estimator):
    """Base class of linear models.

    Attributes:
        coef_: (width,), or (targets, width) for several targets.
        intercept_: a number, or (targets,).
    """

    coef_: Array
    intercept_: Any
    fit_intercept: bool

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Predict this rank's rows, (rows,) or (rows, targets); without communication."""
        rows = self._fitted_rows(X)
        weights = self._put(np.atleast_2d(self.coef_)).T
        parts = [numpy(block @ weights) for _, block in self._blocks(rows)]
        several = np.concatenate([np.empty((0, weights.shape[1])), *parts])
        return np.asarray((several if self.coef_.ndim == 2 else several[:, 0]) + self.intercept_)

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Mean R2 of the targets over the rows of all ranks; all ranks must call it."""
        data = DividedRows(X, self.comm, self.device)
        data.check_width(self.n_features_in_)
        targets, _ = _targets(data, y)
        predicted = data.ranks.together(lambda: self._put(self.predict(data.rows)))
        errors = targets - predicted.reshape(targets.shape)
        mean = _mean(data, targets)
        parts = [errors.square().sum(0), (targets - mean).square().sum(0)]
        wrong, whole = data.ranks.total(
            [tuple(part.shape) for part in parts],
            lambda sums: [one.copy_(part) for one, part in zip(sums, parts, strict=True)],
            data.device,
        )
        return float(_r2(wrong, whole).mean())

    def _take(
        self, data: DividedRows, fit: Fit, centres: tuple[Tensor, Tensor], flat: bool
    ) -> None:
        weights = fit.weights[0].T
        offset = centres[1] + fit.y - weights @ (centres[0] + fit.x)
        self.coef_ = numpy(weights[0] if flat else weights)
        intercept = numpy(offset)
        self.intercept_ = float(intercept[0]) if flat else intercept
        if not self.fit_intercept:
            self.intercept_ = 0.0
        self.n_features_in_ = data.width

    def _centres(self, data: DividedRows, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self.fit_intercept:
            return data.mean(), _mean(data, targets)
        like = targets.new_zeros
        return like(data.width), like(targets.shape[1])


class Ridge(_Linear):
    """Least squares with an L2 penalty.

    Args:
        alpha: penalty, at least 0; a number, or one per target.
        fit_intercept: whether to fit an unpenalised constant.
        comm: communicator of mpi4py or of this package; None: single process.
        device: device of the computation.
    """

    def __init__(
        self,
        alpha: Any = 1.0,
        *,
        fit_intercept: bool = True,
        comm: Comm = None,
        device: str = "cpu",
    ) -> None:
        self.alpha, self.fit_intercept = alpha, fit_intercept
        self.comm, self.device = comm, device

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Fit targets (rows,) or (rows, targets); all ranks must call it with their own rows.

        Raises:
            ValueError: on all ranks: invalid rows, targets or alpha.
        """
        data = DividedRows(X, self.comm, self.device)
        targets, flat = _targets(data, y)
        alphas = _alphas(self.alpha)
        if len(alphas) not in (1, targets.shape[1]):
            raise ValueError(f"alpha has {len(alphas)} numbers for {targets.shape[1]} targets")
        centres = self._centres(data, targets)
        folds = torch.zeros(data.rows.count, dtype=torch.int64, device=data.device)
        sums = normal_equations.collect(data, targets, folds, 1, centres).fold(0)
        strengths = alphas.to(data.device)[None]
        self._take(data, normal_equations.solve(sums, strengths, self.fit_intercept), centres, flat)
        return self


class RidgeCV(_Linear):
    """Ridge regression with the penalty chosen by cross-validation.

    The rows are read once: sums without a fold are the total sums minus those of the fold.

    Args:
        alphas: candidate penalties.
        fit_intercept: whether to fit an unpenalised constant.
        scoring: `r2` or `neg_mean_squared_error`; the mean over the folds selects the penalty.
        cv: number of folds: contiguous ranges of all rows, or whole groups.
        comm: communicator of mpi4py or of this package; None: single process.
        device: device of the computation.

    Attributes:
        alpha_: selected penalty.
        best_score_: mean score of `alpha_` over the folds.
        scores_: (alphas, folds).
        folds_: (rows,), folds of this rank's rows.
        fold_coef_: (folds, targets, width), weights fitted without each fold, with `alpha_`.
        fold_intercept_: (folds, targets), constants fitted without each fold.
    """

    alpha_: float
    best_score_: float
    scores_: Array
    folds_: Array
    fold_coef_: Array
    fold_intercept_: Array

    def __init__(
        self,
        alphas: Any = (0.1, 1.0, 10.0),
        *,
        fit_intercept: bool = True,
        scoring: str = R2,
        cv: int = 5,
        comm: Comm = None,
        device: str = "cpu",
    ) -> None:
        self.alphas, self.fit_intercept, self.scoring = alphas, fit_intercept, scoring
        self.cv, self.comm, self.device = cv, comm, device

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:  # noqa: N803
        """Fit targets (rows,) or (rows, targets); all ranks must call it with their own rows.

        Args:
            X: this rank's rows.
            y: targets of the same rows.
            groups: groups of the same rows, such as patients; a group stays in one fold.

        Raises:
            ValueError: on all ranks: invalid rows, targets, alphas or folds.
        """
        if self.scoring not in (R2, MSE):
            raise ValueError(f"scoring={self.scoring!r} must be {R2!r} or {MSE!r}")
        count = positive("cv", self.cv)
        alphas = _alphas(self.alphas)
        data = DividedRows(X, self.comm, self.device)
        targets, flat = _targets(data, y)
        folds = _folds(data, count, groups)
        centres = self._centres(data, targets)
        sums = normal_equations.collect(data, targets, folds, count, centres)
        whole, strengths = sums.whole(), alphas.to(data.device)[:, None]
        fits, scores = [], []
        for fold in range(count):
            held_out = sums.fold(fold)
            fits.append(
                normal_equations.solve(whole.without(held_out), strengths, self.fit_intercept)
            )
            scores.append(self._scored(held_out, fits[-1]))
        self.scores_ = numpy(torch.stack(scores, 1))
        best = int(self.scores_.mean(1).argmax())
        self.alpha_, self.best_score_ = float(alphas[best]), float(self.scores_.mean(1)[best])
        chosen = strengths[best : best + 1]
        self._take(data, normal_equations.solve(whole, chosen, self.fit_intercept), centres, flat)
        self._take_folds(fits, best, centres)
        self.folds_ = numpy(folds)
        return self

    def _scored(self, sums: Sums, fit: Fit) -> Tensor:
        """Mean score of the targets, (alphas,)."""
        wrong = normal_equations.squared_errors(sums, fit)
        if self.scoring == MSE:
            return -(wrong / sums.rows).mean(1)
        return _r2(wrong, normal_equations.spread(sums)).mean(1)

    def _take_folds(self, fits: list[Fit], best: int, centres: tuple[Tensor, Tensor]) -> None:
        weights = torch.stack([fit.weights[best].T for fit in fits])
        offsets = [
            centres[1] + fit.y - one @ (centres[0] + fit.x)
            for one, fit in zip(weights, fits, strict=True)
        ]
        self.fold_coef_ = numpy(weights)
        self.fold_intercept_ = numpy(torch.stack(offsets)) * bool(self.fit_intercept)

    def without(self, fold: int) -> Self:
        """The model fitted without a fold, for predictions."""
        model = copy.copy(self)
        flat = self.coef_.ndim == 1
        model.coef_ = self.fold_coef_[fold][0] if flat else self.fold_coef_[fold]
        offset = self.fold_intercept_[fold]
        model.intercept_ = float(offset[0]) if flat else offset
        return model

    def predict_held_out(self, X: Any) -> Array:  # noqa: N803
        """Predict the rows of `fit`, each by the model fitted without its fold."""
        rows = self._fitted_rows(X)
        if rows.count != len(self.folds_):
            raise ValueError(f"there are {rows.count} rows, fit had {len(self.folds_)}")
        predicted = np.empty((rows.count, self.fold_coef_.shape[1]))
        for place, block in self._blocks(rows):
            numbers = self.folds_[place]
            for fold in np.unique(numbers):
                chosen = torch.from_numpy(np.flatnonzero(numbers == fold)).to(block.device)
                values = numpy(block[chosen] @ self._put(self.fold_coef_[fold]).T)
                predicted[place][numbers == fold] = values + self.fold_intercept_[fold]
        return predicted if self.coef_.ndim == 2 else predicted[:, 0]


def _r2(wrong: Tensor, whole: Tensor) -> Tensor:
    """R2; for constant targets 1 if predicted exactly, else 0, as in scikit-learn."""
    constant = (wrong > 0).logical_not().to(wrong.dtype)
    score: Tensor = torch.where(whole > 0, 1 - wrong / torch.where(whole > 0, whole, 1.0), constant)
    return score


def _mean(data: DividedRows, targets: Tensor) -> Tensor:
    own = targets.sum(0)
    [total] = data.ranks.total([tuple(own.shape)], lambda sums: sums[0].add_(own), data.device)
    mean: Tensor = total / data.total
    return mean


def _alphas(values: Any) -> Tensor:
    """Penalties as a tensor, (strengths,).

    Raises:
        ValueError: empty, negative or not finite.
    """
    alphas = np.atleast_1d(np.asarray(values, np.float64))
    if alphas.ndim != 1 or not len(alphas) or not np.isfinite(alphas).all() or (alphas < 0).any():
        raise ValueError(f"alpha={values!r} must be numbers of at least 0")
    return torch.from_numpy(alphas)


def _targets(data: DividedRows, values: Any) -> tuple[Tensor, bool]:
    """Targets of this rank, (rows, targets), and whether there is one target (flat results).

    Raises:
        ValueError: on all ranks: targets are not finite, or do not match the rows.
    """

    def parse() -> Tensor:
        parsed = torch.as_tensor(np.asarray(values, np.float64))
        if parsed.ndim not in (1, 2) or len(parsed) != data.rows.count:
            raise ValueError(
                f"targets have shape {tuple(parsed.shape)} for {data.rows.count} rows, expected "
                "(rows,) or (rows, targets)"
            )
        if not torch.isfinite(parsed).all():
            row = int((~torch.isfinite(parsed)).nonzero()[0, 0])
            raise ValueError(f"the target of {data.rows.place(row)} is not finite")
        return parsed

    own = data.ranks.together(parse)
    everywhere = data.ranks.comm.allgather(tuple(own.shape))
    shapes = {shape[1:] for shape in everywhere if shape[0]}
    if len(shapes) > 1:
        raise ValueError(f"ranks have targets of different shapes: {everywhere}")
    [shape] = shapes
    targets = own.reshape(data.rows.count, *(shape or (1,))).to(data.device)
    return targets, targets.shape[1] == 1


def _folds(data: DividedRows, count: int, groups: Any) -> Tensor:
    """Folds of this rank's rows, (rows,)."""
    if groups is None:
        if count < 2 or count > data.total:
            raise ValueError(f"cv={count} must be between 2 and the {data.total} rows on all ranks")
        index = data.first + torch.arange(data.rows.count)
        # the first folds have one row more, as in scikit-learn
        size, more = divmod(data.total, count)
        folds = torch.where(index < more * (size + 1), index // (size + 1), (index - more) // size)
        return folds.to(data.device)
    own = data.ranks.together(lambda: _named(groups, data.rows.count))
    sizes: dict[str, int] = {}
    for each in data.ranks.comm.allgather(
        dict(zip(*np.unique(own, return_counts=True), strict=True))
    ):
        for name, rows in each.items():
            sizes[name] = sizes.get(name, 0) + int(rows)
    if count < 2 or count > len(sizes):
        raise ValueError(f"cv={count} must be between 2 and the {len(sizes)} groups")
    filled, fold_of = [0] * count, dict[str, int]()
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):  # the largest first
        fold_of[name] = filled.index(min(filled))
        filled[fold_of[name]] += sizes[name]
    folds = torch.tensor([fold_of[name] for name in own], dtype=torch.int64)
    return folds.to(data.device)


def _named(groups: Any, count: int) -> Array:
    names = np.asarray(groups).astype(str)
    if names.shape != (count,):
        raise ValueError(f"groups have shape {names.shape}, expected one for each of {count} rows")
    return names
