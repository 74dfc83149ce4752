"""Matrix products: linear layers, matmul and related functions, einsum."""

from __future__ import annotations

import string
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.spatial.contract import contract
from spatialdl.spatial.dense import dense
from spatialdl.spatial.span import on_meta
from spatialdl.spatial.table import refusal, register_op, spatial_in
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile
from spatialdl.spatial.window import autocast_cast


@register_op(F.linear, split=("input",), prefix=True)
def linear(input: SpatialTensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    dims = input.spatial_dims
    is_square = weight.shape == (input.shape[-1], input.shape[-1]) and set(dims.outer) == {1}
    if dims.is_flat and not is_square:
        return dense(input, weight, bias)
    if -1 in dims.at:
        return _mixed(input, weight, bias)
    tile = F.linear(to_tile(input), weight, bias)
    return from_tile(tile, input.spatial_layout, input.mesh, dims)


def _mixed(input: SpatialTensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer over pixels: over all tokens, or along rows or columns alone."""
    x, weight, bias = autocast_cast(input, weight, bias)
    on_meta(F.linear, *([x, weight] if bias is None else [x, weight, bias]))
    before, row = string.ascii_uppercase[: input.dim() - 1], "n" * (weight.dim() - 1)
    mixed = contract(F.linear, (x, weight), (before + "k", row + "k"), before + row, F.linear)
    return mixed if bias is None else mixed + bias


# --- matmul


def _matmul(func: Any, a: Tensor, b: Tensor) -> Tensor:
    if a.dim() == 0 or b.dim() == 0:
        raise RuntimeError("matmul: both arguments need at least 1 dim")
    inner_b = b.shape[-2] if b.dim() > 1 else b.shape[0]
    if a.shape[-1] != inner_b:
        raise RuntimeError(
            f"matmul: shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied"
        )
    count = max(a.dim(), b.dim()) - 2
    batch = string.ascii_uppercase[: max(count, 0)]
    a_letters = "k" if a.dim() == 1 else batch[len(batch) - (a.dim() - 2) :] + "mk"
    b_letters = "k" if b.dim() == 1 else batch[len(batch) - (b.dim() - 2) :] + "kn"
    rows = "m" if a.dim() > 1 else ""
    cols = "n" if b.dim() > 1 else ""
    return contract(func, (a, b), (a_letters, b_letters), batch + rows + cols, torch.matmul)


@register_op(torch.matmul, Tensor.matmul, Tensor.__matmul__, split=("input", "other"), prefix=True)
def matmul(input: Tensor, other: Tensor) -> Tensor:
    return _matmul(torch.matmul, input, other)


@register_op(Tensor.__rmatmul__, split=("input", "other"), prefix=True)
def rmatmul(input: Tensor, other: Tensor) -> Tensor:
    """``other @ input``, if `other` does not implement it."""
    return _matmul(torch.matmul, other, input)


@register_op(torch.bmm, Tensor.bmm, split=("input", "mat2"), prefix=True)
def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    _check_dims("bmm", input, mat2, 3)
    return _matmul(torch.bmm, input, mat2)


@register_op(torch.mm, Tensor.mm, split=("input", "mat2"), prefix=True)
def mm(input: Tensor, mat2: Tensor) -> Tensor:
    _check_dims("mm", input, mat2, 2)
    return _matmul(torch.mm, input, mat2)


@register_op(torch.mv, Tensor.mv, split=("input", "vec"), prefix=True)
def mv(input: Tensor, vec: Tensor) -> Tensor:
    return _matmul(torch.mv, input, vec)


def _check_dims(name: str, a: Tensor, b: Tensor, count: int) -> None:
    if a.dim() != count or b.dim() != count or a.shape[:-2] != b.shape[:-2]:
        raise RuntimeError(
            f"{name} takes two tensors of {count} dims and equal batch, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )


def _added(func: Any, base: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return scaled
    result: Tensor = scaled + (base if beta == 1 else base * beta)
    if result.shape != product.shape:
        raise refusal(func, spatial_in((base, product)), "its first operand is too large")
    return result


@register_op(torch.addmm, Tensor.addmm, split=("input", "mat1", "mat2"), prefix=True)
def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    _check_dims("addmm", mat1, mat2, 2)
    return _added(torch.addmm, input, torch.matmul(mat1, mat2), beta, alpha)


@register_op(torch.baddbmm, Tensor.baddbmm, split=("input", "batch1", "batch2"), prefix=True)
def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    _check_dims("baddbmm", batch1, batch2, 3)
    return _added(torch.baddbmm, input, torch.matmul(batch1, batch2), beta, alpha)


# --- einsum


@register_op(torch.einsum, split=("operands",), prefix=True)
def einsum(equation: str, *operands: Any) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        raise refusal(torch.einsum, spatial_in(operands), "pass the equation as a string")
    letters, result = _parsed(equation.replace(" ", ""), operands)
    for names in letters:
        if len(set(names)) < len(names):
            raise refusal(
                torch.einsum, spatial_in(operands), f"diagonals ({equation}) are not supported"
            )
    _check_sizes(equation, letters, operands)

    def local(*tiles: Tensor) -> Tensor:
        product: Tensor = torch.einsum(f"{','.join(letters)}->{result}", *tiles)
        return product

    return contract(torch.einsum, operands, letters, result, local)


def _parsed(equation: str, operands: tuple[Tensor, ...]) -> tuple[list[str], str]:
    """The letters of the operands and of the result, with ``...`` expanded."""
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise RuntimeError(
            f"einsum: {len(terms)} terms in '{equation}', but {len(operands)} operands"
        )
    free = [c for c in string.ascii_letters if c not in equation]
    hidden = [
        x.dim() - len(term.replace("...", "")) if "..." in term else 0
        for term, x in zip(terms, operands, strict=True)
    ]
    dots = "".join(free[: max(hidden)])
    letters = [
        term.replace("...", dots[len(dots) - count :])
        for term, count in zip(terms, hidden, strict=True)
    ]
    for names, x in zip(letters, operands, strict=True):
        if len(names) != x.dim():
            raise RuntimeError(
                f"einsum: '{equation}' names {len(names)} dims of an operand of shape "
                f"{tuple(x.shape)}"
            )
    if arrow:
        return letters, right.replace("...", dots)
    counted = "".join(letters)
    once = sorted(c for c in set(counted) if counted.count(c) == 1 and c not in dots)
    return letters, dots + "".join(once)


def _check_sizes(equation: str, letters: list[str], operands: tuple[Tensor, ...]) -> None:
    sizes: dict[str, int] = {}
    for names, x in zip(letters, operands, strict=True):
        for name, size in zip(names, x.shape, strict=True):
            known = sizes.setdefault(name, size)
            if 1 not in (known, size) and known != size:
                raise RuntimeError(f"einsum: '{name}' in '{equation}' has sizes {known} and {size}")
            sizes[name] = max(known, size)
