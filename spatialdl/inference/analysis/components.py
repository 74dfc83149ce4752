"""PCA and truncated singular value decomposition of rows divided over ranks."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from spatialdl.inference.analysis.rows import Array, Comm, DividedRows, Estimator, positive


class _Projection(Estimator):
    """Base class of the linear projections, from the (width, width) Gram matrix of all rows.

    Signs are those of scikit-learn: the entry of a component of the largest size is positive.

    Attributes:
        components_: (components, width), unit vectors.
        explained_variance_: (components,), variance of each projection.
        explained_variance_ratio_: (components,), relative to the variance of all features.
        singular_values_: (components,).
    """

    components_: Array

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
        return block @ torch.from_numpy(self.components_).T

    def _take(self, vectors: Tensor, singular: Tensor, variance: Tensor, whole: float) -> None:
        self.components_, self.singular_values_ = vectors.numpy(), singular.numpy()
        self.explained_variance_ = variance.numpy()
        self.explained_variance_ratio_ = _share(variance, whole).numpy()
        self.n_features_in_ = vectors.shape[1]


class PCA(_Projection):
    """Principal component analysis of rows divided over ranks.

    Args:
        n_components: number of components; or, between 0 and 1, the share of variance to explain;
            None: all.
        comm: communicator of mpi4py or of this package; None: single process.

    Attributes:
        mean_: (width,).
        n_components_: number of components.
        n_samples_: rows of all ranks.
        noise_variance_: mean variance of the discarded directions.
    """

    def __init__(self, n_components: int | float | None = None, *, comm: Comm = None) -> None:
        self.n_components, self.comm = n_components, comm

    def fit(self, X: Any, y: object = None) -> Self:  # noqa: N803
        """Fit the components; all ranks must call it with their own rows.

        Raises:
            ValueError: on all ranks: invalid n_components or rows.
        """
        data = DividedRows(X, self.comm, least=2)
        wanted, most = self.n_components, min(data.total, data.width)
        is_share = isinstance(wanted, float) and 0 < wanted < 1
        count = most if is_share or wanted is None else _count(wanted, most)
        singular, vectors = _vectors(data, data.mean)
        variance = singular.square() / (data.total - 1)
        whole = float(variance.sum())
        if is_share:
            reached = _share(variance, whole).cumsum(0)
            at = torch.searchsorted(reached, torch.tensor(wanted).to(reached), right=True)
            count = min(int(at) + 1, most)
        self._take(vectors[:count], singular[:count], variance[:count], whole)
        self.mean_, self.n_components_, self.n_samples_ = data.mean.numpy(), count, data.total
        left = max(0.0, whole - float(variance[:count].sum()))
        self.noise_variance_ = left / (most - count) if count < most else 0.0
        return self

    def _projected(self, block: Tensor) -> Tensor:
        return super()._projected(block - torch.from_numpy(self.mean_))


class TruncatedSVD(_Projection):
    """Truncated SVD of rows divided over ranks, without subtracting the mean.

    Args:
        n_components: number of components.
        comm: communicator of mpi4py or of this package; None: single process.
    """

    def __init__(self, n_components: int = 2, *, comm: Comm = None) -> None:
        self.n_components, self.comm = n_components, comm

    def fit(self, X: Any, y: object = None) -> Self:  # noqa: N803
        """Fit the components; all ranks must call it with their own rows.

        Raises:
            ValueError: on all ranks: invalid n_components or rows.
        """
        data = DividedRows(X, self.comm)
        count = _count(self.n_components, min(data.total, data.width))
        singular, vectors = (one[:count] for one in _vectors(data, None))
        mean = data.mean

        def add(sums: list[Tensor], _: slice, block: Tensor) -> None:
            sums[0].add_(((block - mean) @ vectors.T).square().sum(0))

        [spread] = data.sums([(count,)], add)
        whole = float(data.variation.sum()) / data.total
        self._take(vectors, singular, spread / data.total, whole)
        return self


def _share(variance: Tensor, whole: float) -> Tensor:
    return variance / whole if whole else torch.zeros_like(variance)


def _count(components: object, most: int) -> int:
    """The number of components.

    Raises:
        ValueError: more than the rows have.
    """
    count = positive("n_components", components)
    if count > most:
        raise ValueError(
            f"n_components={count} is more than {most}, the minimum of rows and columns"
        )
    return count


def _vectors(data: DividedRows, centre: Tensor | None) -> tuple[Tensor, Tensor]:
    """All singular values, largest first, and right singular vectors (k, width)."""

    def add(sums: list[Tensor], _: slice, block: Tensor) -> None:
        rows = block if centre is None else block - centre
        sums[0].addmm_(rows.T, rows)

    [gram] = data.sums([(data.width, data.width)], add)
    values, columns = torch.linalg.eigh(gram)
    most = min(data.total, data.width)
    singular, vectors = values.flip(0).clamp(min=0).sqrt()[:most], columns.flip(1).T[:most]
    signs = vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign()
    return singular, vectors * torch.where(signs == 0, 1.0, signs)
