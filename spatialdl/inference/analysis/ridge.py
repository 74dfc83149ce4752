"""Ridge regression on rows divided over ranks, by normal equations: of numbers, of classes."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from spatialdl.inference.analysis.rows import Array, Comm, DividedRows, Estimator, positive, total
from spatialdl.inference.predicting.loop import agreeing


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
        several = self._applied(
            X, lambda block: block @ torch.from_numpy(np.atleast_2d(self.coef_)).T
        )
        return np.asarray((several if self.coef_.ndim == 2 else several[:, 0]) + self.intercept_)

    def _take(self, data: DividedRows, coef: Array, intercept: Array, flat: bool) -> None:
        self.coef_, self.intercept_ = (coef[0], float(intercept[0])) if flat else (coef, intercept)
        self.n_features_in_ = data.width

    def _centres(self, data: DividedRows, targets: Tensor) -> Centres:
        if self.fit_intercept:
            return data.mean, _mean(data, targets)
        like = targets.new_zeros
        return like(data.width), like(targets.shape[1])


class Ridge(_Linear):
    """Least squares with an L2 penalty.

    Args:
        alpha: penalty, at least 0; a number, or one per target.
        fit_intercept: whether to fit an unpenalised constant.
        comm: communicator of mpi4py or of this package; None: single process.
    """

    def __init__(
        self,
        alpha: Any = 1.0,
        *,
        fit_intercept: bool = True,
        comm: Comm = None,
    ) -> None:
        self.alpha, self.fit_intercept = alpha, fit_intercept
        self.comm = comm

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Fit targets (rows,) or (rows, targets); all ranks must call it with their own rows.

        Raises:
            ValueError: on all ranks: invalid rows, targets or alpha.
        """
        data = DividedRows(X, self.comm)
        targets, flat = _targets(data, y)
        alphas = _alphas(self.alpha)
        if len(alphas) not in (1, targets.shape[1]):
            raise ValueError(f"alpha has {len(alphas)} numbers for {targets.shape[1]} targets")
        centres = self._centres(data, targets)
        folds = torch.zeros(data.rows.count, dtype=torch.int64)
        [products] = _products(data, targets, folds, 1, centres)
        strengths = alphas[None]
        [errors] = _solve(products, data.width, strengths, self.fit_intercept)
        self._take(data, *_coefficients(errors, centres), flat)
        return self


class RidgeCV(_Linear):
    """Ridge regression with the penalty chosen by cross-validation.

    The rows are read once: sums without a fold are the total sums minus those of the fold.

    Args:
        alphas: candidate penalties.
        fit_intercept: whether to fit an unpenalised constant.
        cv: number of folds: contiguous ranges of all rows, or whole groups.
        comm: communicator of mpi4py or of this package; None: single process.

    Attributes:
        alpha_: selected penalty.
        scores_: (alphas, folds), negative mean squared errors; their mean selects the penalty.
        best_score_: mean of the scores of `alpha_`.
        folds_: (rows,), folds of this rank's rows.
        fold_coef_: (folds, targets, width), weights fitted without each fold, with `alpha_`.
        fold_intercept_: (folds, targets), constants fitted without each fold.
    """

    def __init__(
        self,
        alphas: Any = (0.1, 1.0, 10.0),
        *,
        fit_intercept: bool = True,
        cv: int = 5,
        comm: Comm = None,
    ) -> None:
        self.alphas, self.fit_intercept, self.cv, self.comm = alphas, fit_intercept, cv, comm

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:  # noqa: N803
        """Fit targets (rows,) or (rows, targets); all ranks must call it with their own rows.

        Args:
            X: this rank's rows.
            y: targets of the same rows.
            groups: groups of the same rows, such as patients; a group stays in one fold.

        Raises:
            ValueError: on all ranks: invalid rows, targets, alphas or folds.
        """
        count = positive("cv", self.cv)
        alphas = _alphas(self.alphas)
        data = DividedRows(X, self.comm)
        targets, flat = _targets(data, y)
        folds = _folds(data, count, groups)
        centres = self._centres(data, targets)
        products = _products(data, targets, folds, count, centres)
        whole, strengths = products.sum(0), alphas[:, None]
        fits, scores = [], []
        for held_out in products:
            fits.append(_solve(whole - held_out, data.width, strengths, self.fit_intercept))
            scores.append(_scores(held_out, fits[-1]))
        self.scores_ = torch.stack(scores, 1).numpy()
        best = int(self.scores_.mean(1).argmax())
        self.alpha_, self.best_score_ = float(alphas[best]), float(self.scores_.mean(1)[best])
        [errors] = _solve(whole, data.width, strengths[best : best + 1], self.fit_intercept)
        self._take(data, *_coefficients(errors, centres), flat)
        of_folds = [_coefficients(fit[best], centres) for fit in fits]
        self.fold_coef_, self.fold_intercept_ = map(np.stack, zip(*of_folds, strict=True))
        self.folds_ = folds.numpy()
        return self

    def without(self, fold: int) -> Self:
        """The model fitted without a fold, for predictions."""
        model = copy.copy(self)
        flat = self.coef_.ndim == 1
        model.coef_ = self.fold_coef_[fold][0] if flat else self.fold_coef_[fold]
        offset = self.fold_intercept_[fold]
        model.intercept_ = float(offset[0]) if flat else offset
        return model


class RidgeClassifierCV(RidgeCV):
    """Ridge classifier with the penalty chosen by cross-validation.

    The class of the largest decision value is predicted; of two classes the second if the single
    decision value is above 0, as in scikit-learn's `RidgeClassifier`. The penalty is that of
    `RidgeCV` on the targets +1 and -1.

    Args:
        alphas: candidate penalties.
        fit_intercept: whether to fit an unpenalised constant.
        cv: number of folds: contiguous ranges of all rows, or whole groups.
        comm: communicator of mpi4py or of this package; None: single process.

    Attributes:
        classes_: (classes,), sorted text.
    """

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:  # noqa: N803
        """Fit classes (rows,); all ranks must call it with their own rows.

        Args:
            X: this rank's rows.
            y: classes of the same rows, converted to text.
            groups: groups of the same rows, such as patients; a group stays in one fold.

        Raises:
            ValueError: on all ranks: see `RidgeCV`, or fewer than two classes.
        """
        own = np.asarray(y).astype(str)
        comm = DividedRows(X, self.comm).comm
        everywhere = set(chain.from_iterable(comm.allgather(sorted(set(own.ravel().tolist())))))
        if len(everywhere) < 2:
            raise ValueError(
                f"there are {len(everywhere)} classes on all ranks, expected at least 2"
            )
        self.classes_ = np.array(sorted(everywhere))
        coded = np.where(own[..., None] == self.classes_, 1.0, -1.0)
        return super().fit(X, coded[..., 1] if len(self.classes_) == 2 else coded, groups)

    def decision_function(self, X: Any) -> Array:  # noqa: N803
        """Decision values of this rank's rows, (rows, classes), or (rows,) for two classes."""
        return super().predict(X)

    def decide(self, decisions: Array) -> Array:
        """Classes of decision values, (rows,)."""
        several = decisions.ndim == 2
        numbers = decisions.argmax(1) if several else (decisions > 0).astype(np.int64)
        return np.asarray(self.classes_[numbers])

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Predict the classes of this rank's rows, (rows,); without communication."""
        return self.decide(self.decision_function(X))


# --- normal equations: products of the columns of z = (x, y, 1), minus fixed centres
#
# The error y - prediction is z c: a fit is c, (size, targets), with the weights negated, then the
# identity, then a constant. The sum of its squares over some rows is c' (sum of z z') c.

Centres = tuple[Tensor, Tensor]


def _products(
    data: DividedRows, targets: Tensor, folds: Tensor, count: int, centres: Centres
) -> Tensor:
    """Sums of z z' over the rows of all ranks in each fold, (count, size, size).

    Args:
        targets: targets of this rank's rows, (rows, targets).
        folds: folds of this rank's rows, below `count`.
        centres: subtracted from rows and targets, to avoid cancellation between sums.
    """

    def add(sums: list[Tensor], place: slice, block: Tensor) -> None:
        y, numbers = targets[place] - centres[1], folds[place]
        z = torch.cat([block - centres[0], y, torch.ones_like(y[:, :1])], 1)
        for fold in torch.unique(numbers).tolist():
            some = z[numbers == fold]
            sums[0][fold].addmm_(some.T, some)

    size = data.width + targets.shape[1] + 1
    [products] = data.sums([(count, size, size)], add)
    return products


def _solve(products: Tensor, width: int, alphas: Tensor, intercept: bool) -> Tensor:
    """Solve ridge regressions by an eigendecomposition of the Gram matrix.

    Args:
        products: sums over the rows.
        alphas: (strengths, targets or 1), at least 0; 0 gives the minimum-norm solution.
        intercept: whether to fit a constant.

    Returns:
        Fits, (strengths, size, targets).
    """
    means = products[-1] / products[-1, -1] * intercept
    centred = products - torch.outer(products[-1], means)
    xx, xy = centred[:width, :width], centred[:width, width:-1]
    values, vectors = torch.linalg.eigh(xx)
    noise = len(values) * torch.finfo(values.dtype).eps * values[-1].clamp(min=0)
    values = torch.where(values > noise, values, 0.0)
    bottom = values[:, None] + alphas[:, None]  # (strengths, width, targets or 1)
    turned = torch.where(bottom > 0, (vectors.T @ xy) / torch.where(bottom > 0, bottom, 1.0), 0.0)
    weights = vectors @ turned
    constant = means[:width] @ weights - means[width:-1]
    identity = torch.eye(xy.shape[1], dtype=xy.dtype)
    return torch.cat([-weights, identity.expand(len(weights), -1, -1), constant[:, None]], 1)


def _coefficients(errors: Tensor, centres: Centres) -> tuple[Array, Array]:
    """Weights (targets, width) and intercepts (targets,) of a fit."""
    weights = -errors[: len(centres[0])].T
    return weights.numpy(), (centres[1] - weights @ centres[0] - errors[-1]).numpy()


def _scores(products: Tensor, errors: Tensor) -> Tensor:
    """Negative mean squared errors of fits over the rows of a fold, (alphas,)."""
    wrong = torch.einsum("sit,ij,sjt->st", errors, products, errors).clamp(min=0)
    return -(wrong / products[-1, -1]).mean(1)


def _mean(data: DividedRows, targets: Tensor) -> Tensor:
    own = targets.sum(0)
    [sums] = total(data.comm, [tuple(own.shape)], lambda sums: sums[0].add_(own))
    return sums.div(data.total)


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
    with agreeing(data.comm):
        own = torch.as_tensor(np.asarray(values, np.float64))
        if own.ndim not in (1, 2) or len(own) != data.rows.count:
            raise ValueError(
                f"targets have shape {tuple(own.shape)} for {data.rows.count} rows, expected "
                "(rows,) or (rows, targets)"
            )
        if not torch.isfinite(own).all():
            row = int((~torch.isfinite(own)).nonzero()[0, 0])
            raise ValueError(f"the target of {data.rows.place(row)} is not finite")
    everywhere = data.comm.allgather(tuple(own.shape))
    shapes = {shape[1:] for shape in everywhere if shape[0]}
    if len(shapes) > 1:
        raise ValueError(f"ranks have targets of different shapes: {everywhere}")
    [shape] = shapes
    targets = own.reshape(data.rows.count, *(shape or (1,)))
    return targets, targets.shape[1] == 1


def _folds(data: DividedRows, count: int, groups: Any) -> Tensor:
    """Folds of this rank's rows, (rows,)."""
    if groups is None:
        if count < 2 or count > data.total:
            raise ValueError(f"cv={count} must be between 2 and the {data.total} rows on all ranks")
        index = data.first + torch.arange(data.rows.count)
        # the first folds have one row more, as in scikit-learn
        size, more = divmod(data.total, count)
        return torch.where(index < more * (size + 1), index // (size + 1), (index - more) // size)
    with agreeing(data.comm):
        own = np.asarray(groups).astype(str)
        if own.shape != (data.rows.count,):
            raise ValueError(
                f"groups have shape {own.shape}, expected one for each of {data.rows.count} rows"
            )
    sizes = Counter(name for of_rank in data.comm.allgather(own.tolist()) for name in of_rank)
    if count < 2 or count > len(sizes):
        raise ValueError(f"cv={count} must be between 2 and the {len(sizes)} groups")
    filled, fold_of = [0] * count, dict[str, int]()
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):  # the largest first
        fold_of[name] = filled.index(min(filled))
        filled[fold_of[name]] += sizes[name]
    return torch.tensor([fold_of[name] for name in own], dtype=torch.int64)
