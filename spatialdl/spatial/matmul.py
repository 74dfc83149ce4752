"""Matrix products: linear layers, matmul and related functions, einsum."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.once import once_differentiable
from spatialdl.comm.reduce import differentiable_sum
from spatialdl.layout.layout import Interval
from spatialdl.spatial.autocast import HALF, autocast_cast, is_enabled, wide
from spatialdl.spatial.contract import contract
from spatialdl.spatial.dims import SpatialDims
from spatialdl.spatial.table import refusal, register_op, spatial_in
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile


@register_op(F.linear, split=("input",), prefix=True)
def linear(input: SpatialTensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    dims = input.spatial_dims
    is_square = weight.shape == (input.shape[-1], input.shape[-1]) and set(dims.outer) == {1}
    if dims.is_flat and not is_square:
        return dense(input, weight, bias)
    if -1 in dims.at:
        return _linear_over_pixels(input, weight, bias)
    tile = F.linear(to_tile(input), weight, bias)
    return from_tile(tile, input.spatial_layout, input.mesh, dims)


def _linear_over_pixels(input: SpatialTensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer over pixels: over all tokens, or along rows or columns alone."""
    x, weight, bias = autocast_cast(input, weight, bias)
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


def _add_base(func: Any, base: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
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
    return _add_base(torch.addmm, input, torch.matmul(mat1, mat2), beta, alpha)


@register_op(torch.baddbmm, Tensor.baddbmm, split=("input", "batch1", "batch2"), prefix=True)
def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    _check_dims("baddbmm", batch1, batch2, 3)
    return _add_base(torch.baddbmm, input, torch.matmul(batch1, batch2), beta, alpha)


# --- einsum


@register_op(torch.einsum, split=("operands",), prefix=True)
def einsum(equation: str, *operands: Any) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        raise refusal(torch.einsum, spatial_in(operands), "pass the equation as a string")
    letters, result = parse_equation(equation, operands)
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


def parse_equation(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """The letters of the operands and of the result of an einsum, with ``...`` expanded."""
    equation = equation.replace(" ", "")
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


# --- linear layers over a flattened map
#
# Each rank has some columns of the flattened map. They are not contiguous: a tile of (N, C*H*W) has
# a box of pixels of each channel. The rank multiplies them by the same columns of the weight, and
# the products are summed over the ranks. No rank ever has the whole map.


class Columns(NamedTuple):
    """The columns of a weight that belong to a rank.

    Attributes:
        dims: of the flattened map: all spatial dims are in its last dim.
        size: of the map.
        box: the rank's intervals of the spatial dims.
        is_first: whether the rank also has the columns that belong to no pixel.
    """

    dims: SpatialDims
    size: tuple[int, ...]
    box: tuple[Interval, ...]
    is_first: bool

    @classmethod
    def of(cls, x: SpatialTensor) -> Columns:
        layout, mesh = x.spatial_layout, x.mesh
        box = mesh.own_box(layout).spatial
        return cls(x.spatial_dims, layout.size, tuple(box), mesh.part == 0)

    def views(self, weight: Tensor) -> list[Tensor]:
        """Views of the columns of a weight, (out, ...) each, in the order of the tile.

        Args:
            weight: (out, in), all columns.
        """
        before, stop = self.dims.prefix, weight.shape[1] - self.dims.suffix
        factors: list[int] = []
        for outer, size in zip(self.dims.outer, self.size, strict=True):
            factors += [outer, size]
        pixels = weight[:, before:stop].view(len(weight), *factors)
        for number, (first, last) in enumerate(self.box):
            pixels = pixels.narrow(2 * number + 2, first, last - first)
        beside = self.dims.extra_tokens and self.is_first
        return [weight[:, :before], pixels, weight[:, stop:]] if beside else [pixels]

    def take(self, weight: Tensor) -> Tensor:
        """The columns of a weight (out, in): (out, own)."""
        parts = [one.flatten(1) for one in self.views(weight)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def place(self, own: Tensor, count: int) -> Tensor:
        """The columns (out, own) placed in zeros (out, `count`)."""
        whole = own.new_zeros(len(own), count)
        views = self.views(whole)
        parts = torch.split(own, [one[0].numel() for one in views], 1)
        for one, part in zip(views, parts, strict=True):
            one.copy_(part.view(one.shape))
        return whole


class _OwnColumns(torch.autograd.Function):
    """A rank's part of the product; saves the tile and the weight, as PyTorch does."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, weight: Tensor, columns: Columns, mixed: bool) -> Tensor:
        ctx.save_for_backward(tile, weight)
        ctx.columns, ctx.mixed = columns, mixed
        return F.linear(tile, _cast(columns.take(weight), tile, mixed))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tile, weight = ctx.saved_tensors
        needs_tile, needs_weight = ctx.needs_input_grad[:2]
        columns: Columns = ctx.columns
        count = math.prod(grad.shape[:-1])  # -1 is ambiguous for an empty tile
        grad_tile = grad_weight = None
        if needs_weight:
            rows = grad.reshape(count, grad.shape[-1])
            own = rows.t() @ tile.reshape(count, tile.shape[-1]).conj()
            grad_weight = columns.place(own.to(weight.dtype), weight.shape[1])
        if needs_tile:
            grad_tile = grad @ _cast(columns.take(weight), tile, ctx.mixed).conj()
        return grad_tile, grad_weight, None, None


def _cast(own: Tensor, tile: Tensor, mixed: bool) -> Tensor:
    """Cast as autocast does; without autocast a dtype mismatch raises PyTorch's error."""
    return own.to(tile.dtype) if mixed else own


def dense(input: SpatialTensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` over a flattened map: a plain tensor, the same on every rank.

    Args:
        input: (..., in), with all spatial dims in its last dim.
        weight: (out, in), or (in,).
        bias: (out,) or ().
    """
    if input.mesh.grid_comm.size == 1:
        return F.linear(to_tile(input), weight, bias)
    kind = input.device.type
    mixed = is_enabled(kind)
    if weight.dim() == 1:
        return dense(input, weight[None], None).squeeze(-1)
    tile = to_tile(input)
    if mixed and tile.dtype in (torch.float32, *HALF):
        tile = tile.to(torch.get_autocast_dtype(kind))
    part: Tensor = _OwnColumns.apply(tile, weight, Columns.of(input), mixed)  # type: ignore[no-untyped-call]
    total = differentiable_sum(input.mesh.grid_comm, wide(part), "linear")
    if bias is not None:
        total = total + bias.to(total.dtype)  # rounded once, as by a kernel
    return total.to(part.dtype)
