"""Classes by ridge regression: a number for each class, +1 of the own and -1 of the others."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from spatialdl.analysis.estimator import Array
from spatialdl.analysis.ranks import Comm
from spatialdl.analysis.ridge import MSE, RidgeCV
from spatialdl.analysis.rows import DividedRows


class RidgeClassifierCV(RidgeCV):
    """Ridge regression of classes, whose penalty is chosen by cross-validation.

    A class is predicted where its number is the largest; of two classes the second where the one
    number is above 0, as `RidgeClassifier` of scikit-learn does. The penalty is that of `RidgeCV`
    on these numbers.

    Args:
        alphas: strengths among which to choose.
        fit_intercept: whether there is a constant, which is not penalised.
        scoring: `r2` or `neg_mean_squared_error` of the numbers, whose mean over the folds decides.
        cv: number of folds: stretches of all rows, in their order, or whole groups.
        comm: mpi4py's communicator or this package's; None is a single process.
        device: where to compute.

    Attributes:
        classes_: (classes,), text in order.
    """

    classes_: Array

    def __init__(
        self,
        alphas: Any = (0.1, 1.0, 10.0),
        *,
        fit_intercept: bool = True,
        scoring: str = MSE,
        cv: int = 5,
        comm: Comm = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(
            alphas, fit_intercept=fit_intercept, scoring=scoring, cv=cv, comm=comm, device=device
        )

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:  # noqa: N803
        """Fit classes (rows,); all ranks must call it with their own rows.

        Args:
            X: this rank's rows.
            y: of the same rows, text or what becomes text.
            groups: of the same rows, such as patients; a group is never in two folds.

        Raises:
            ValueError: on all ranks: see `RidgeCV`, or there are fewer than two classes.
        """
        own = np.asarray(y).astype(str)
        ranks = DividedRows(X, self.comm, self.device).ranks
        everywhere = {
            name
            for names in ranks.comm.allgather(sorted(set(own.ravel().tolist())))
            for name in names
        }
        if len(everywhere) < 2:
            raise ValueError(
                f"there are {len(everywhere)} classes on all ranks, expected at least 2"
            )
        self.classes_ = np.array(sorted(everywhere))
        coded = np.where(own[..., None] == self.classes_, 1.0, -1.0)
        return super().fit(X, coded[..., 1] if len(self.classes_) == 2 else coded, groups)

    def decision_function(self, X: Any) -> Array:  # noqa: N803
        """(rows, classes), or (rows,) of two classes: of this rank's rows; needs no other rank."""
        return super().predict(X)

    def decide(self, decisions: Array) -> Array:
        """(rows,): the classes that follow from what `decision_function` gives."""
        several = decisions.ndim == 2
        numbers = decisions.argmax(1) if several else (decisions > 0).astype(np.int64)
        return np.asarray(self.classes_[numbers])

    def predict(self, X: Any) -> Array:  # noqa: N803
        """(rows,): the class of each of this rank's rows; needs no other rank."""
        return self.decide(self.decision_function(X))

    def predict_held_out(self, X: Any) -> Array:  # noqa: N803
        """As `predict`, each row of `fit` by the model that has not seen its fold."""
        return self.decide(super().predict_held_out(X))

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Share of the rows of all ranks whose class is predicted; all ranks must call it."""
        data = DividedRows(X, self.comm, self.device)
        data.check_width(self.n_features_in_)
        own = data.ranks.together(
            lambda: int((self.predict(data.rows) == np.asarray(y).astype(str)).sum())
        )
        return float(sum(data.ranks.comm.allgather(own)) / data.total)
