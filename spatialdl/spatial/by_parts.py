"""Products with all tokens of a split tensor, the parts of which circulate.

Used for queries times keys and weights times values in attention without a fused kernel. As in
`ring`, no rank holds all keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.once import once_differentiable
from spatialdl.spatial.autocast import wide
from spatialdl.spatial.constants import on
from spatialdl.spatial.ring import GradientReturn, Ring, circulate
from spatialdl.spatial.span import positions_of
from spatialdl.spatial.tensor import SpatialTensor

Local = Callable[..., Tensor]


class _Parts(NamedTuple):
    """A contraction by parts of one operand.

    Attributes:
        local: the contraction.
        passing: number of the circulating operand.
        at: for each operand the dim, negative, of the split letter of the circulating one; or
            None.
        into: the dim of the result with this letter, negative; None if it is summed over.
        columns: the positions of each part in this dim.
    """

    local: Local
    ring: Ring
    passing: int
    at: tuple[int | None, ...]
    into: int | None
    columns: tuple[Tensor, ...]

    def operands(self, own: Sequence[Tensor], tokens: Tensor, part: int) -> list[Tensor]:
        """The operands of a block."""
        return [
            tokens if number == self.passing else self.columns_of(x, self.at[number], part)
            for number, x in enumerate(own)
        ]

    def columns_of(self, x: Tensor, dim: int | None, part: int) -> Tensor:
        """The columns of a part; `x` itself if it has no such dim."""
        if dim is None or x.shape[dim] == 1:
            return x
        return x.index_select(dim, on(self.columns[part], x.device))

    def unpack(self, message: Tensor, like: Tensor, part: int) -> Tensor:
        shape = list(like.shape)
        shape[self._dim] = self.ring.counts[part]
        return message.view(shape)

    def elements(self, tile: Tensor) -> int:
        """The number of elements per token."""
        shape = list(tile.shape)
        shape[self._dim] = 1
        return math.prod(shape)

    @property
    def _dim(self) -> int:
        dim = self.at[self.passing]
        assert dim is not None
        return dim


class _ByParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: _Parts, *own: Tensor) -> Tensor:
        ctx.parts = parts
        ctx.save_for_backward(*own)
        tile = own[parts.passing]
        result: Tensor | None = None
        for number, message in circulate(parts.ring, tile.reshape(1, -1), parts.elements(tile)):
            part = parts.ring.part(number)
            tokens = parts.unpack(message, tile, part)
            block = parts.local(*parts.operands(own, tokens, part))
            result = _place_block(result, block, parts, part)
        assert result is not None
        return result.to(block.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts, own = ctx.parts, ctx.saved_tensors
        tile = own[parts.passing]
        message = tile.reshape(1, -1)
        returning = GradientReturn(parts.ring, parts.elements(tile))
        grads = [wide(torch.zeros_like(x)) for x in own]
        for number, arrived in circulate(parts.ring, message, parts.elements(tile)):
            part = parts.ring.part(number)
            tokens = parts.unpack(arrived, tile, part)
            operands = [x.detach() for x in parts.operands(own, tokens, part)]
            block_grads = _gradients(parts, operands, parts.columns_of(grad, parts.into, part))
            going = block_grads[parts.passing].reshape(1, -1)
            # The first is accumulated into, and may share memory with autograd's gradient.
            returning.send(number, going if number else going.clone())
            for place, one in enumerate(block_grads):
                if place != parts.passing:
                    _add_gradient(grads[place], one, parts, parts.at[place], part)
        returning.wait()
        grads[parts.passing] = returning.total.view(tile.shape)
        return None, *(one.to(x.dtype) for one, x in zip(grads, own, strict=True))


def _place_block(result: Tensor | None, block: Tensor, parts: _Parts, part: int) -> Tensor:
    """Put the result of a part into the whole result; half precision is summed in float32."""
    if parts.into is None:
        return wide(block) if result is None else result.add_(block)
    if result is None:
        shape = list(block.shape)
        shape[parts.into] = sum(parts.ring.counts)
        result = block.new_empty(shape)
    return result.index_copy_(parts.into, on(parts.columns[part], block.device), block)


def _gradients(parts: _Parts, operands: list[Tensor], grad: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        inputs = [x.requires_grad_() for x in operands]
        block = parts.local(*inputs)
    grads = torch.autograd.grad(block, inputs, grad, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]


def _add_gradient(into: Tensor, grad: Tensor, parts: _Parts, dim: int | None, part: int) -> None:
    if dim is None or into.shape[dim] == 1:
        into += grad
    else:
        into.index_add_(dim, on(parts.columns[part], into.device), grad.to(into.dtype))


def by_parts(
    local: Local,
    own: Sequence[Tensor],
    letters: Sequence[str],
    result: str,
    passing: int,
    x: SpatialTensor,
) -> Tensor:
    """A contraction with all tokens of `x`; differentiable.

    Args:
        local: the contraction, linear in each operand.
        own: the operands of this rank: the tile of `x`, and the needed parts of the rest.
        letters: of the operands; `x` is split along one of its letters.
        result: the letters of the result.
        passing: the number of the operand `x`.
    """
    split = x.spatial_dims.at[0]
    letter = letters[passing][split]
    columns = tuple(positions_of(x, split, part) for part in range(x.mesh.grid_comm.size))

    def place(names: str) -> int | None:
        return names.index(letter) - len(names) if letter in names else None

    ring = Ring(x.mesh, tuple(map(len, columns)))
    at = tuple(map(place, letters))
    parts = _Parts(local, ring, passing, at, place(result), columns)
    product: Tensor = _ByParts.apply(parts, *own)  # type: ignore[no-untyped-call]
    return product
