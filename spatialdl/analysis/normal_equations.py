"""Normal equations of ridge regression, as sums per fold that can be subtracted again."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from spatialdl.analysis.rows import DividedRows


class Sums(NamedTuple):
    """Sums over rows x with targets y, each minus a fixed centre.

    All have a leading dim for several folds.

    Attributes:
        rows: number of rows, ().
        x: (width,).
        y: (targets,).
        xx: (width, width).
        xy: (width, targets).
        yy: (targets,), sums of squares.
    """

    rows: Tensor
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor

    def fold(self, number: int) -> Self:
        return type(self)(*(each[number] for each in self))

    def whole(self) -> Self:
        """The sum over all folds."""
        return type(self)(*(each.sum(0) for each in self))

    def without(self, other: Sums) -> Self:
        return type(self)(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class Fit(NamedTuple):
    """Regressions for several penalties: y - b is predicted by (x - a) w.

    Attributes:
        weights: w, (strengths, width, targets).
        x: a, (width,).
        y: b, (targets,).
    """

    weights: Tensor
    x: Tensor
    y: Tensor


def collect(
    data: DividedRows,
    targets: Tensor,
    folds: Tensor,
    count: int,
    centres: tuple[Tensor, Tensor],
) -> Sums:
    """Sums of each fold over the rows of all ranks.

    Args:
        data: the rows.
        targets: targets of this rank's rows, (rows, targets).
        folds: folds of this rank's rows, below `count`.
        count: number of folds.
        centres: subtracted from rows and targets, to avoid cancellation between sums.
    """

    def add(sums: list[Tensor], place: slice, block: Tensor) -> None:
        rows, wanted, numbers = block - centres[0], targets[place] - centres[1], folds[place]
        for fold in torch.unique(numbers).tolist():
            chosen = numbers == fold
            x, y = rows[chosen], wanted[chosen]
            parts: list[Any] = [len(x), x.sum(0), y.sum(0), x.T @ x, x.T @ y, y.square().sum(0)]
            for total, part in zip(sums, parts, strict=True):
                total[fold] += part

    width, many = data.width, targets.shape[1]
    shapes = [(), (width,), (many,), (width, width), (width, many), (many,)]
    return Sums(*data.sums([(count, *shape) for shape in shapes], add))


def solve(sums: Sums, alphas: Tensor, intercept: bool) -> Fit:
    """Solve ridge regressions by an eigendecomposition of the Gram matrix.

    Args:
        sums: sums over the rows.
        alphas: (strengths, targets or 1), at least 0; 0 gives the minimum-norm solution.
        intercept: whether to fit a constant.
    """
    x, y = (sums.x / sums.rows, sums.y / sums.rows) if intercept else (sums.x * 0, sums.y * 0)
    xx, xy = sums.xx, sums.xy
    if intercept:
        xx, xy = xx - torch.outer(sums.x, x), xy - torch.outer(sums.x, y)
    values, vectors = torch.linalg.eigh(xx)
    noise = len(values) * torch.finfo(values.dtype).eps * values[-1].clamp(min=0)
    values = torch.where(values > noise, values, 0.0)
    bottom = values[:, None] + alphas[:, None]  # (strengths, width, targets or 1)
    turned = torch.where(bottom > 0, (vectors.T @ xy) / torch.where(bottom > 0, bottom, 1.0), 0.0)
    return Fit(vectors @ turned, x, y)


def squared_errors(sums: Sums, fit: Fit) -> Tensor:
    """Squared errors (strengths, targets) of a fit, from the sums alone."""
    count, dx, dy = sums.rows, sums.x - sums.rows * fit.x, sums.y - sums.rows * fit.y
    yy = sums.yy - 2 * fit.y * sums.y + count * fit.y.square()
    xy = sums.xy - torch.outer(fit.x, dy) - torch.outer(sums.x, fit.y)
    xx = sums.xx - torch.outer(fit.x, dx) - torch.outer(sums.x, fit.x)
    cross = (fit.weights * xy).sum(1)
    squares = (fit.weights * (xx @ fit.weights)).sum(1)
    return (yy - 2 * cross + squares).clamp(min=0)


def spread(sums: Sums) -> Tensor:
    """Total sum of squares of the targets about their mean, (targets,)."""
    return (sums.yy - sums.y.square() / sums.rows.clamp(min=1)).clamp(min=0)
