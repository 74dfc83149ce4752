"""Classification by ridge regression on targets +1 (the class of a row) and -1 (all others)."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from spatialdl.analysis.estimator import Array
from spatialdl.analysis.ranks import Comm
from spatialdl.analysis.ridge import MSE, RidgeCV
from spatialdl.analysis.rows import DividedRows


class RidgeClassifierCV(RidgeCV):
    """Ridge classifier with the penalty chosen by cross-validation.

    The class of the largest decision value is predicted; of two classes the second if the single
    decision value is above 0, as in scikit-learn's `RidgeClassifier`. The penalty is that of
    `RidgeCV` on the targets +1 and -1.

    Args:
        alphas: candidate penalties.
        fit_intercept: whether to fit an unpenalised constant.
        scoring: `r2` or `neg_mean_squared_error` of the decision values; the mean over the folds
            selects the penalty.
        cv: number of folds: contiguous ranges of all rows, or whole groups.
        comm: communicator of mpi4py or of this package; None: single process.
        device: device of the computation.

    Attributes:
        classes_: (classes,), sorted text.
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
            y: classes of the same rows, converted to text.
            groups: groups of the same rows, such as patients; a group stays in one fold.

        Raises:
            ValueError: on all ranks: see `RidgeCV`, or fewer than two classes.
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

    def predict_held_out(self, X: Any) -> Array:  # noqa: N803
        """Predict the rows of `fit`, each by the model fitted without its fold."""
        return self.decide(super().predict_held_out(X))

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Accuracy over the rows of all ranks; all ranks must call it."""
        data = DividedRows(X, self.comm, self.device)
        data.check_width(self.n_features_in_)
        own = data.ranks.together(
            lambda: int((self.predict(data.rows) == np.asarray(y).astype(str)).sum())
        )
        return float(sum(data.ranks.comm.allgather(own)) / data.total)
