"""Principal components and truncated singular value decomposition of rows divided among ranks."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from spatialdl.analysis import moments
from spatialdl.analysis.estimator import Array, Estimator, numpy, positive
from spatialdl.analysis.ranks import Comm
from spatialdl.analysis.rows import DividedRows

_WIDE = 4096  # columns above which the matrix of their products is no longer decomposed
_RANDOMIZED, _AUTO = "randomized", "auto"


class _Projection(Estimator):
    """What both have in common.

    Attributes:
        components_: (components, width), unit vectors.
        explained_variance_: of each component.
        explained_variance_ratio_: of each component, of the variance of all features.
        singular_values_: of each component.
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
        """Find the components; all ranks must call it with their own rows."""
        raise NotImplementedError

    def transform(self, X: Any) -> Array:  # noqa: N803
        """(rows, components): this rank's rows projected; needs no other rank."""
        rows = self._fitted_rows(X)
        vectors = self._put(self.components_)
        found = [numpy(self._projected(block, vectors)) for _, block in self._blocks(rows)]
        return np.concatenate([np.empty((0, len(vectors))), *found])

    def fit_transform(self, X: Any, y: object = None) -> Array:  # noqa: N803
        """Find the components, and return this rank's rows projected."""
        return self.fit(X).transform(X)

    def _projected(self, block: Tensor, vectors: Tensor) -> Tensor:
        return block @ vectors.T

    def inverse_transform(self, X: Any) -> Array:  # noqa: N803
        """(rows, width): rows of this projection put back among the features."""
        return np.asarray(np.asarray(X, np.float64) @ self.components_)


class PCA(_Projection):
    """Principal components: directions of most variance around the mean.

    Args:
        n_components: how many; a part of the variance between 0 and 1; None is all.
        whiten: scale the projections to a variance of 1.
        svd_solver: `covariance_eigh`, exact, by the width x width matrix of products;
            `randomized`, for many columns; `auto`, the latter for more than 4,096 columns.
        iterated_power: subspace iterations of `randomized`.
        n_oversamples: vectors beyond n_components of `randomized`.
        random_state: seed of `randomized`, the same on all ranks.
        comm: mpi4py's communicator or this package's; None is a single process.
        device: where to compute.

    Attributes:
        mean_: (width,).
        n_components_: found.
        n_samples_: rows of all ranks.
        noise_variance_: mean variance of the directions that are left out.
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
        """Find the components; all ranks must call it with their own rows.

        Raises:
            ValueError: on all ranks: n_components does not fit the rows, or some cannot be used.
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
        found = (block - self._put(self.mean_)) @ vectors.T
        return found / self._put(self._scale()) if self.whiten else found

    def _scale(self) -> Array:
        """Standard deviations of the components, 1 where there is none."""
        scale = np.sqrt(self.explained_variance_)
        return np.where(scale > np.finfo(np.float64).eps, scale, 1.0)

    def inverse_transform(self, X: Any) -> Array:  # noqa: N803
        """(rows, width): rows of this projection put back among the features."""
        values = np.asarray(X, np.float64) * (self._scale() if self.whiten else 1)
        return np.asarray(values @ self.components_ + self.mean_)


class TruncatedSVD(_Projection):
    """Singular vectors of the rows as they are, without subtracting the mean.

    Args:
        n_components: how many.
        algorithm: `exact`, by the width x width matrix of products; `randomized`, for many
            columns; `auto`, the latter for more than 4,096 columns.
        n_iter: subspace iterations of `randomized`.
        n_oversamples: vectors beyond n_components of `randomized`.
        random_state: seed of `randomized`, the same on all ranks.
        comm: mpi4py's communicator or this package's; None is a single process.
        device: where to compute.
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
        """Find the components; all ranks must call it with their own rows.

        Raises:
            ValueError: on all ranks: n_components does not fit the rows, or some cannot be used.
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
        """Variance of each projection."""

        def add(sums: list[Tensor], _: slice, block: Tensor) -> None:
            sums[0].add_(((block - mean) @ vectors.T).square().sum(0))

        [total] = data.sums([(len(vectors),)], add)
        spread: Tensor = total / data.total
        return spread


def _wanted(components: int | float | None, most: int, randomized: bool) -> float:
    """How many components, or which part of the variance.

    Raises:
        ValueError: there are not so many, or a solver needs a number.
    """
    if isinstance(components, float) and 0 < components < 1:
        if randomized:
            raise ValueError(
                f"n_components={components} needs all components: the randomized solver takes a "
                "whole number"
            )
        return components
    if components is None:
        return most
    wanted = positive("n_components", components)
    if wanted > most:
        raise ValueError(
            f"n_components={wanted} is more than {most}, the smaller of rows and columns"
        )
    return wanted


def _count_of(ratio: Tensor, part: float) -> int:
    """Components that explain more than a part of the variance."""
    reached = torch.searchsorted(ratio.cumsum(0), torch.tensor(part).to(ratio), right=True)
    return min(int(reached) + 1, len(ratio))
