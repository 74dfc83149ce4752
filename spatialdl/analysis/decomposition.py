"""PCA and truncated singular value decomposition of rows divided over ranks."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from spatialdl.analysis import moments
from spatialdl.analysis.estimator import Array, Estimator, numpy, positive
from spatialdl.analysis.ranks import Comm
from spatialdl.analysis.rows import DividedRows

_WIDE = 4096  # columns above which "auto" avoids the (width, width) Gram matrix
_RANDOMIZED, _AUTO = "randomized", "auto"


class _Projection(Estimator):
    """Base class of the linear projections.

    Attributes:
        components_: (components, width), unit vectors.
        explained_variance_: (components,), variance of each projection.
        explained_variance_ratio_: (components,), relative to the variance of all features.
        singular_values_: (components,).
    """

    components_: Array
    explained_variance_: Array
    explained_variance_ratio_: Array
    singular_values_: Array
    n_components: int | float | None
    n_oversamples: int
    random_state: int | None

    def _vectors(
        self,
        data: DividedRows,
        centre: Tensor | None,
        wanted: int,
        randomized: bool,
        iterations: Any,
    ) -> tuple[Tensor, Tensor]:
        if not randomized:
            singular, vectors = moments.exact(data, centre)
        else:
            few = wanted < 0.1 * min(data.total, data.width)
            singular, vectors = moments.randomized(
                data,
                centre,
                wanted,
                data.ranks.generator(self.random_state),
                oversamples=self.n_oversamples,
                iterations=(7 if few else 4) if iterations == _AUTO else iterations,
            )
        return singular, moments.signed(vectors)

    def fit(self, X: Any, y: object = None) -> Self:  # noqa: N803
        """Fit the components; all ranks must call it with their own rows."""
        raise NotImplementedError

    def transform(self, X: Any) -> Array:  # noqa: N803
        """Project this rank's rows, (rows, components); without communication."""
        rows = self._fitted_rows(X)
        vectors = self._put(self.components_)
        parts = [numpy(self._projected(block, vectors)) for _, block in self._blocks(rows)]
        return np.concatenate([np.empty((0, len(vectors))), *parts])

    def fit_transform(self, X: Any, y: object = None) -> Array:  # noqa: N803
        """Fit the components, and project this rank's rows."""
        return self.fit(X).transform(X)

    def _projected(self, block: Tensor, vectors: Tensor) -> Tensor:
        return block @ vectors.T

    def inverse_transform(self, X: Any) -> Array:  # noqa: N803
        """Map projected rows back to features, (rows, width)."""
        return np.asarray(np.asarray(X, np.float64) @ self.components_)


class PCA(_Projection):
    """Principal component analysis of rows divided over ranks.

    Args:
        n_components: number of components; or, between 0 and 1, the share of variance to explain;
            None: all.
        whiten: scale the projections to a variance of 1.
        svd_solver: `covariance_eigh`, exact, from the (width, width) covariance; `randomized`, for
            many columns; `auto`, the latter for more than 4,096 columns.
        iterated_power: subspace iterations of `randomized`.
        n_oversamples: additional vectors of `randomized`.
        random_state: seed of `randomized`, the same on all ranks.
        comm: communicator of mpi4py or of this package; None: single process.
        device: device of the computation.

    Attributes:
        mean_: (width,).
        n_components_: number of components.
        n_samples_: rows of all ranks.
        noise_variance_: mean variance of the discarded directions.
    """

    mean_: Array
    n_components_: int
    n_samples_: int
    noise_variance_: float

    def __init__(
        self,
        n_components: int | float | None = None,
        *,
        whiten: bool = False,
        svd_solver: str = _AUTO,
        iterated_power: int | str = _AUTO,
        n_oversamples: int = 10,
        random_state: int | None = 0,
        comm: Comm = None,
        device: str = "cpu",
    ) -> None:
        self.n_components, self.whiten, self.svd_solver = n_components, whiten, svd_solver
        self.iterated_power, self.n_oversamples = iterated_power, n_oversamples
        self.random_state, self.comm, self.device = random_state, comm, device

    def fit(self, X: Any, y: object = None) -> Self:  # noqa: N803
        """Fit the components; all ranks must call it with their own rows.

        Raises:
            ValueError: on all ranks: invalid n_components or rows.
        """
        solvers = (_AUTO, "covariance_eigh", _RANDOMIZED)
        if self.svd_solver not in solvers:
            raise ValueError(f"svd_solver={self.svd_solver!r} must be one of {', '.join(solvers)}")
        data = DividedRows(X, self.comm, self.device, least=2)
        most = min(data.total, data.width)
        randomized = self.svd_solver == _RANDOMIZED or (
            self.svd_solver == _AUTO and data.width > _WIDE
        )
        wanted = _wanted(self.n_components, most, randomized)
        mean = data.mean()
        singular, vectors = self._vectors(
            data, mean, int(wanted) if wanted >= 1 else most, randomized, self.iterated_power
        )
        variance = singular.square() / (data.total - 1)
        squares = moments.square_sum(data, mean) if randomized else singular.square()
        whole = float(squares.sum()) / (data.total - 1)
        ratio = variance / whole if whole else torch.zeros_like(variance)
        count = int(wanted) if wanted >= 1 else _count_of(ratio, wanted)
        self.components_, self.singular_values_ = numpy(vectors[:count]), numpy(singular[:count])
        self.explained_variance_ = numpy(variance[:count])
        self.explained_variance_ratio_ = numpy(ratio[:count])
        self.mean_, self.n_components_, self.n_samples_ = numpy(mean), count, data.total
        left = max(0.0, whole - float(variance[:count].sum()))
        self.noise_variance_ = left / (most - count) if count < most else 0.0
        self.n_features_in_ = data.width
        return self

    def _projected(self, block: Tensor, vectors: Tensor) -> Tensor:
        projected = (block - self._put(self.mean_)) @ vectors.T
        return projected / self._put(self._scale()) if self.whiten else projected

    def _scale(self) -> Array:
        """Standard deviations of the components; 1 where the variance vanishes."""
        scale = np.sqrt(self.explained_variance_)
        return np.where(scale > np.finfo(np.float64).eps, scale, 1.0)

    def inverse_transform(self, X: Any) -> Array:  # noqa: N803
        """Map projected rows back to features, (rows, width)."""
        values = np.asarray(X, np.float64) * (self._scale() if self.whiten else 1)
        return np.asarray(values @ self.components_ + self.mean_)


class TruncatedSVD(_Projection):
    """Truncated SVD of rows divided over ranks, without subtracting the mean.

    Args:
        n_components: number of components.
        algorithm: `exact`, from the (width, width) Gram matrix; `randomized`, for many columns;
            `auto`, the latter for more than 4,096 columns.
        n_iter: subspace iterations of `randomized`.
        n_oversamples: additional vectors of `randomized`.
        random_state: seed of `randomized`, the same on all ranks.
        comm: communicator of mpi4py or of this package; None: single process.
        device: device of the computation.
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        algorithm: str = _AUTO,
        n_iter: int | str = _AUTO,
        n_oversamples: int = 10,
        random_state: int | None = 0,
        comm: Comm = None,
        device: str = "cpu",
    ) -> None:
        self.n_components, self.algorithm, self.n_iter = n_components, algorithm, n_iter
        self.n_oversamples, self.random_state = n_oversamples, random_state
        self.comm, self.device = comm, device

    def fit(self, X: Any, y: object = None) -> Self:  # noqa: N803
        """Fit the components; all ranks must call it with their own rows.

        Raises:
            ValueError: on all ranks: invalid n_components or rows.
        """
        if self.algorithm not in (_AUTO, "exact", _RANDOMIZED):
            raise ValueError(
                f"algorithm={self.algorithm!r} must be one of auto, exact, {_RANDOMIZED}"
            )
        data = DividedRows(X, self.comm, self.device)
        randomized = self.algorithm == _RANDOMIZED or (
            self.algorithm == _AUTO and data.width > _WIDE
        )
        wanted = positive("n_components", self.n_components)
        _wanted(wanted, min(data.total, data.width), True)
        singular, vectors = self._vectors(data, None, wanted, randomized, self.n_iter)
        count = wanted
        singular, vectors = singular[:count], vectors[:count]
        mean = data.mean()
        spread = self._spread(data, mean, vectors)
        whole = float(moments.square_sum(data, mean).sum()) / data.total
        self.components_, self.singular_values_ = numpy(vectors), numpy(singular)
        self.explained_variance_ = numpy(spread)
        self.explained_variance_ratio_ = numpy(spread / whole if whole else spread)
        self.n_features_in_ = data.width
        return self

    def _spread(self, data: DividedRows, mean: Tensor, vectors: Tensor) -> Tensor:
        """Variance of each projection, (components,)."""

        def add(sums: list[Tensor], _: slice, block: Tensor) -> None:
            sums[0].add_(((block - mean) @ vectors.T).square().sum(0))

        [total] = data.sums([(len(vectors),)], add)
        spread: Tensor = total / data.total
        return spread


def _wanted(components: int | float | None, most: int, randomized: bool) -> float:
    """Number of components, or share of the variance below 1.

    Raises:
        ValueError: more than the rows have, or a share with the randomized solver.
    """
    if isinstance(components, float) and 0 < components < 1:
        if randomized:
            raise ValueError(
                f"n_components={components} needs all components: use a whole number with the "
                "randomized solver"
            )
        return components
    if components is None:
        return most
    wanted = positive("n_components", components)
    if wanted > most:
        raise ValueError(
            f"n_components={wanted} is more than {most}, the minimum of rows and columns"
        )
    return wanted


def _count_of(ratio: Tensor, part: float) -> int:
    """Number of components that explain more than a share of the variance."""
    reached = torch.searchsorted(ratio.cumsum(0), torch.tensor(part).to(ratio), right=True)
    return min(int(reached) + 1, len(ratio))
