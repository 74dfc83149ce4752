"""PCA and truncated singular value decomposition of rows divided over ranks."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from spatialdl.inference.analysis.estimator import Array, Estimator, numpy, positive
from spatialdl.inference.analysis.rows import Comm, DividedRows
from spatialdl.inference.predicting.agreed_errors import agreeing

_WIDE = 4096  # columns above which "auto" avoids the (width, width) Gram matrix
_OVERSAMPLES = 10  # additional vectors of the randomised solver
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

    def _take(
        self, data: DividedRows, vectors: Tensor, singular: Tensor, variance: Tensor, whole: float
    ) -> None:
        self.components_, self.singular_values_ = numpy(vectors), numpy(singular)
        self.explained_variance_ = numpy(variance)
        self.explained_variance_ratio_ = numpy(_share(variance, whole))
        self.n_features_in_ = data.width

    def fit(self, X: Any, y: object = None) -> Self:  # noqa: N803
        """Fit the components; all ranks must call it with their own rows."""
        raise NotImplementedError

    def transform(self, X: Any) -> Array:  # noqa: N803
        """Project this rank's rows, (rows, components); without communication."""
        return self._applied(X, self._projected)

    def fit_transform(self, X: Any, y: object = None) -> Array:  # noqa: N803
        """Fit the components, and project this rank's rows."""
        return self.fit(X).transform(X)

    def _projected(self, block: Tensor) -> Tensor:
        return block @ self._put(self.components_).T


class PCA(_Projection):
    """Principal component analysis of rows divided over ranks.

    Args:
        n_components: number of components; or, between 0 and 1, the share of variance to explain;
            None: all.
        svd_solver: `covariance_eigh`, exact, from the (width, width) covariance; `randomized`, for
            many columns; `auto`, the latter for more than 4,096 columns.
        random_state: seed of `randomized`, the same on all ranks.
        comm: communicator of mpi4py or of this package; None: single process.
        device: device of the computation.

    Attributes:
        mean_: (width,).
        n_components_: number of components.
        n_samples_: rows of all ranks.
        noise_variance_: mean variance of the discarded directions.
    """

    def __init__(
        self,
        n_components: int | float | None = None,
        *,
        svd_solver: str = _AUTO,
        random_state: int | None = 0,
        comm: Comm = None,
        device: str = "cpu",
    ) -> None:
        self.n_components, self.svd_solver = n_components, svd_solver
        self.random_state = random_state
        self.comm, self.device = comm, device

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
        randomized = _is_randomized(self.svd_solver, data)
        wanted = _wanted(self.n_components, most, randomized)
        kept = int(wanted) if wanted >= 1 else most
        mean, iterations = data.mean, _AUTO if randomized else None
        singular, vectors = _vectors(data, mean, kept, self.random_state, iterations)
        variance = singular.square() / (data.total - 1)
        squares = _square_sum(data, mean) if randomized else singular.square()
        whole = float(squares.sum()) / (data.total - 1)
        count = kept if wanted >= 1 else _count_of(_share(variance, whole), wanted)
        self._take(data, vectors[:count], singular[:count], variance[:count], whole)
        self.mean_, self.n_components_, self.n_samples_ = numpy(mean), count, data.total
        left = max(0.0, whole - float(variance[:count].sum()))
        self.noise_variance_ = left / (most - count) if count < most else 0.0
        return self

    def _projected(self, block: Tensor) -> Tensor:
        return super()._projected(block - self._put(self.mean_))


class TruncatedSVD(_Projection):
    """Truncated SVD of rows divided over ranks, without subtracting the mean.

    Args:
        n_components: number of components.
        algorithm: `exact`, from the (width, width) Gram matrix; `randomized`, for many columns;
            `auto`, the latter for more than 4,096 columns.
        n_iter: subspace iterations of `randomized`.
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
        random_state: int | None = 0,
        comm: Comm = None,
        device: str = "cpu",
    ) -> None:
        self.n_components, self.algorithm, self.n_iter = n_components, algorithm, n_iter
        self.random_state, self.comm, self.device = random_state, comm, device

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
        randomized = _is_randomized(self.algorithm, data)
        wanted = positive("n_components", self.n_components)
        _wanted(wanted, min(data.total, data.width), randomized=True)
        iterations = self.n_iter if randomized else None
        found = _vectors(data, None, wanted, self.random_state, iterations)
        singular, vectors = (one[:wanted] for one in found)
        mean = data.mean

        def add(sums: list[Tensor], _: slice, block: Tensor) -> None:
            sums[0].add_(((block - mean) @ vectors.T).square().sum(0))

        [spread] = data.sums([(len(vectors),)], add)
        whole = float(_square_sum(data, mean).sum()) / data.total
        self._take(data, vectors, singular, spread / data.total, whole)
        return self


def _is_randomized(solver: str, data: DividedRows) -> bool:
    return solver == _RANDOMIZED or (solver == _AUTO and data.width > _WIDE)


def _share(variance: Tensor, whole: float) -> Tensor:
    return variance / whole if whole else torch.zeros_like(variance)


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


# --- singular vectors


def _vectors(
    data: DividedRows,
    centre: Tensor | None,
    wanted: int,
    seed: int | None,
    iterations: int | str | None,
) -> tuple[Tensor, Tensor]:
    """Singular values, largest first, and right singular vectors (k, width); at least `wanted`.

    Signs are flipped so that the largest absolute entry is positive, as in scikit-learn.

    Args:
        iterations: subspace iterations of the randomised solver; None: the exact one.
    """
    if iterations is not None:
        few = wanted < 0.1 * min(data.total, data.width)
        times = (7 if few else 4) if isinstance(iterations, str) else iterations
        singular, vectors = _by_range_finder(data, centre, wanted, seed, times)
    else:
        [gram] = data.sums([(data.width, data.width)], _adding_products(centre, None))
        values, vectors = torch.linalg.eigh(gram)
        most = min(data.total, data.width)
        singular, vectors = values.flip(0).clamp(min=0).sqrt()[:most], vectors.flip(1).T[:most]
    signs = vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign()
    return singular, vectors * torch.where(signs == 0, 1.0, signs)


def _by_range_finder(
    data: DividedRows, centre: Tensor | None, wanted: int, seed: int | None, iterations: int
) -> tuple[Tensor, Tensor]:
    """Largest singular values and right singular vectors, by a randomised range finder.

    Halko, Martinsson and Tropp, "Finding structure with randomness", 2011: subspace iteration
    (algorithm 4.4, here on the row space, replicated on all ranks) and factorisation of the
    projected rows (section 5.1), by a tall-skinny QR over blocks (TSQR).
    """
    size = min(wanted + _OVERSAMPLES, data.total, data.width)
    rng = data.generator(seed)
    basis = torch.from_numpy(rng.standard_normal((data.width, size))).to(data.device)
    for _ in range(iterations + 1):
        [twice] = data.sums([tuple(basis.shape)], _adding_products(centre, basis))
        basis, _ = torch.linalg.qr(twice)
    _, singular, turned = torch.linalg.svd(_factor(data, centre, basis))
    count = min(wanted, len(singular))
    return singular[:count], (basis @ turned.T).T[:count]


def _factor(data: DividedRows, centre: Tensor | None, basis: Tensor) -> Tensor:
    """Factor R of the QR factorisation of A basis, (size, size), with A the rows of all ranks."""
    size = basis.shape[1]
    factor = basis.new_zeros(size, size)
    with agreeing(data.comm):
        for _, block in data.rows.blocks(data.device):
            rows = block if centre is None else block - centre
            factor = torch.linalg.qr(torch.cat([factor, rows @ basis]), mode="r").R
    factors = data.comm.all_gather(factor.cpu().contiguous())
    whole: Tensor = torch.linalg.qr(factors.reshape(-1, size), mode="r").R
    return whole.to(data.device)


def _adding_products(centre: Tensor | None, basis: Tensor | None) -> Any:
    """Adds A' A, or A' (A basis), of a block of rows A minus the centre."""

    def add(sums: list[Tensor], _: slice, block: Tensor) -> None:
        rows = block if centre is None else block - centre
        sums[0].addmm_(rows.T, rows if basis is None else rows @ basis)

    return add


def _square_sum(data: DividedRows, centre: Tensor) -> Tensor:
    """Squares (width,): sum over all rows of x^2, with x a row minus the centre."""
    [total] = data.sums(
        [(data.width,)], lambda sums, _, block: sums[0].add_((block - centre).square().sum(0))
    )
    return total
