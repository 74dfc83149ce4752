"""Gram matrices and singular vectors of rows divided over ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spatialdl.analysis.rows import DividedRows


def gram(data: DividedRows, centre: Tensor | None) -> Tensor:
    """Gram matrix (width, width): sum over all rows of x x', with x a row minus the centre."""

    def add(sums: list[Tensor], _: slice, block: Tensor) -> None:
        rows = block if centre is None else block - centre
        sums[0].addmm_(rows.T, rows)

    [total] = data.sums([(data.width, data.width)], add)
    return total


def square_sum(data: DividedRows, centre: Tensor | None) -> Tensor:
    """Squares (width,): sum over all rows of x^2, with x a row minus the centre."""

    def add(sums: list[Tensor], _: slice, block: Tensor) -> None:
        sums[0].add_((block if centre is None else block - centre).square().sum(0))

    [total] = data.sums([(data.width,)], add)
    return total


def exact(data: DividedRows, centre: Tensor | None) -> tuple[Tensor, Tensor]:
    """All singular values, largest first, and right singular vectors, (k, width)."""
    values, vectors = torch.linalg.eigh(gram(data, centre))
    most = min(data.total, data.width)
    singular = values.flip(0).clamp(min=0).sqrt()[:most]
    return singular, vectors.flip(1).T[:most]


def randomized(
    data: DividedRows,
    centre: Tensor | None,
    wanted: int,
    rng: np.random.RandomState,
    *,
    oversamples: int,
    iterations: int,
) -> tuple[Tensor, Tensor]:
    """Largest singular values and right singular vectors, by a randomised range finder.

    Halko, Martinsson and Tropp, "Finding structure with randomness", 2011: subspace iteration
    (algorithm 4.4, here on the row space, replicated on all ranks) and factorisation of the
    projected rows (section 5.1), by a tall-skinny QR over blocks (TSQR).
    """
    size = min(wanted + oversamples, data.total, data.width)
    basis = torch.from_numpy(rng.standard_normal((data.width, size))).to(data.device)
    for _ in range(iterations + 1):
        basis, _ = torch.linalg.qr(_applied_twice(data, centre, basis))
    _, singular, turned = torch.linalg.svd(_factor(data, centre, basis))
    count = min(wanted, len(singular))
    return singular[:count], (basis @ turned.T).T[:count]


def _applied_twice(data: DividedRows, centre: Tensor | None, basis: Tensor) -> Tensor:
    """A' (A basis), with A the rows of all ranks."""

    def add(sums: list[Tensor], _: slice, block: Tensor) -> None:
        rows = block if centre is None else block - centre
        sums[0].addmm_(rows.T, rows @ basis)

    [total] = data.sums([tuple(basis.shape)], add)
    return total


def _factor(data: DividedRows, centre: Tensor | None, basis: Tensor) -> Tensor:
    """Factor R of the QR factorisation of A basis, (size, size)."""
    size = basis.shape[1]

    def own() -> Tensor:
        factor = basis.new_zeros(size, size)
        for _, block in data.rows.blocks(data.device):
            rows = block if centre is None else block - centre
            factor = torch.linalg.qr(torch.cat([factor, rows @ basis]), mode="r").R
        return factor

    factors = data.ranks.comm.all_gather(data.ranks.together(own).cpu().contiguous())
    whole: Tensor = torch.linalg.qr(factors.reshape(-1, size), mode="r").R
    return whole.to(data.device)


def signed(vectors: Tensor) -> Tensor:
    """Flip signs so that the largest absolute entry is positive, as in scikit-learn."""
    largest = vectors.abs().argmax(1, keepdim=True)
    signs = vectors.gather(1, largest).sign()
    turned: Tensor = vectors * torch.where(signs == 0, 1.0, signs)
    return turned
