"""Sums of which ridge regressions are made, in parts that can be taken out again."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from spatialdl.analysis.rows import DividedRows


class Sums(NamedTuple):
    """Sums over rows x with targets y, each minus a fixed centre.

    With a leading dim they are those of several folds.

    Attributes:
        rows: how many, ().
        x: (width,).
        y: (targets,).
        xx: (width, width).
        xy: (width, targets).
        yy: (targets,), of squares.
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
    """A regression for each of several strengths: y - b is predicted by (x - a) w.

    Attributes:
        weights: (strengths, width, targets).
        x: (width,), a.
        y: (targets,), b.
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
        targets: of this rank's rows, (rows, targets).
        folds: of this rank's rows, numbers below `count`.
        centres: that are subtracted from rows and targets, so that no digits are lost when one
            sum is taken from another.
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
    """Ridge regressions by the eigenvectors of the matrix of products.

    Args:
        alphas: (strengths, targets or 1), at least 0; with 0 the solution of least length.
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
    """(strengths, targets): of a fit on the rows of the sums, without reading them again."""
    count, dx, dy = sums.rows, sums.x - sums.rows * fit.x, sums.y - sums.rows * fit.y
    yy = sums.yy - 2 * fit.y * sums.y + count * fit.y.square()
    xy = sums.xy - torch.outer(fit.x, dy) - torch.outer(sums.x, fit.y)
    xx = sums.xx - torch.outer(fit.x, dx) - torch.outer(sums.x, fit.x)
    cross = (fit.weights * xy).sum(1)
    squares = (fit.weights * (xx @ fit.weights)).sum(1)
    return (yy - 2 * cross + squares).clamp(min=0)


def spread(sums: Sums) -> Tensor:
    """(targets,): squared distances of the targets from their mean."""
    return (sums.yy - sums.y.square() / sums.rows.clamp(min=1)).clamp(min=0)
