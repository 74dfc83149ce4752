"""Attention over some of the keys: the result, its log-sum-exp, and the gradients.

PyTorch's fused kernels run if there is no bias, causal mask or dropout. Otherwise products are
computed for a few queries at a time, so that they take little more memory than the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.spatial.autocast import wide
from spatialdl.spatial.constants import on
from spatialdl.spatial.random.generator import TensorRegion, keep_mask

# --- PyTorch's fused kernels that return the log-sum-exp, by device type; they support a scale, no
# bias, causal mask or dropout here


aten = torch.ops.aten

Result = tuple[Tensor, Tensor]
"""A result (N, heads, L, F) and its log-sum-exp (N, heads, L)."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of query, key and value."""


class Kernel(NamedTuple):
    """A fused attention, for tensors of four dims (N, heads, tokens, features).

    Attributes:
        takes: whether it supports these query, key and value.
        attend: the result, of query, key, value and the factor of their products.
        gradients: the gradients, of the gradient of the result, query, key, value, the result, its
            log-sum-exp and the factor.
    """

    takes: Callable[[Tensor, Tensor, Tensor], bool]
    attend: Callable[[Tensor, Tensor, Tensor, float], Result]
    gradients: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Gradients]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, factor: float) -> Result:
        """Attention of (..., L, E), (..., S, E) and (..., S, F): (..., L, F) and (..., L)."""
        out, spread = self.attend(_four(query), _four(key), _four(value), factor)
        shape = query.shape[:-1]
        return out.reshape(*shape, value.shape[-1]), spread.reshape(shape)

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        saved: tuple[Tensor, Tensor, Tensor],
        factor: float,
    ) -> Gradients:
        """The gradients, from the gradient of the result, the result, and its log-sum-exp."""
        grad, out, spread = saved
        lines = spread.reshape((1,) * (4 - query.dim()) + tuple(spread.shape))
        grads = self.gradients(
            _four(grad), _four(query), _four(key), _four(value), _four(out), lines, factor
        )
        of_query, of_key, of_value = grads
        return (
            of_query.reshape(query.shape),
            of_key.reshape(key.shape),
            of_value.reshape(value.shape),
        )


def kernel_for(query: Tensor, key: Tensor, value: Tensor) -> Kernel | None:
    """The kernel that computes attention of these, (..., tokens, features), or None."""
    kernel = KERNELS.get(query.device.type)
    if kernel is None or query.dim() > 4 or query.shape[-1] != value.shape[-1]:
        return None
    return kernel if kernel.takes(query, key, value) else None


def _four(x: Tensor) -> Tensor:
    """`x` with four dims; the kernels assume that features are contiguous in memory."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


# --- CPU


def _attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, factor: float) -> Result:
    out, spread = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=factor)
    return out, spread


def _gradients_on_cpu(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    spread: Tensor,
    factor: float,
) -> Gradients:
    grads: Gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, spread, 0.0, False, scale=factor
    )
    return grads


# --- CUDA and ROCm: the memory-efficient kernel, which also supports float32 and all GPUs

_ALIGNED = 32
"""CUDA's kernel pads the log-sum-exp to a multiple of this number of queries."""


def _is_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.dtype != torch.float64 and query.shape[-1] % 8 == 0


def _attend_efficiently(query: Tensor, key: Tensor, value: Tensor, factor: float) -> Result:
    out, spread, _, _ = aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, scale=factor
    )
    return out, spread[..., : query.shape[-2]]


def _efficient_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    spread: Tensor,
    factor: float,
) -> Gradients:
    missing = -spread.shape[-1] % _ALIGNED
    if missing > 0 and torch.version.hip is None:
        spread = F.pad(spread, (0, missing), value=torch.inf)
    seed = torch.empty((), dtype=torch.int64, device=query.device)  # for dropout, not read
    wanted = [True, True, True, False]
    of_query, of_key, of_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, None, out, spread, seed, seed, 0.0, wanted, scale=factor
    )
    return of_query, of_key, of_value


_ON_CPU = Kernel(lambda query, key, value: True, _attend_on_cpu, _gradients_on_cpu)

KERNELS: dict[str, Kernel] = {
    "cpu": _ON_CPU,
    "meta": _ON_CPU,
    "cuda": Kernel(_is_efficient, _attend_efficiently, _efficient_gradients),
}


# --- attention over the keys of one part


PIECE = 1 << 24
"""Number of products of queries and keys at a time on an accelerator, 64 MB of float32."""


class WeightDropout(NamedTuple):
    """Dropout of attention weights.

    Attributes:
        key: of the stream of random numbers.
        p: probability.
        shape: of the weights of the whole attention, (..., L, S).
    """

    key: int
    p: float
    shape: tuple[int, ...]


class Scores(NamedTuple):
    """The processing of the products of queries and keys.

    Attributes:
        factor: scale of the products.
        is_causal: whether a query attends only to keys up to its own position.
        drop: dropout of the weights, or None.
        rows: positions of the own queries; int64.
        columns: positions of the keys of each part.
    """

    factor: float
    is_causal: bool
    drop: WeightDropout | None
    rows: Tensor
    columns: tuple[Tensor, ...]

    def of(self, part: int) -> Block:
        return Block(self, self.columns[part])


class Block(NamedTuple):
    """The processing of the products with the keys at `columns`."""

    scores: Scores
    columns: Tensor

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a causal mask nor dropout."""
        return not self.scores.is_causal and self.scores.drop is None

    def rows(self, start: int, stop: int) -> Block:
        """This block for the queries [start, stop)."""
        return self._replace(scores=self.scores._replace(rows=self.scores.rows[start:stop]))

    def weigh(self, query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
        """Scaled products with bias and causal mask; float32 for half precision."""
        products = wide(query @ key.transpose(-2, -1)) * self.scores.factor
        if bias is not None:
            products = products + self.bias_of(bias)
        if self.scores.is_causal:
            columns, rows = (on(x, query.device) for x in (self.columns, self.scores.rows))
            products = products.masked_fill(columns > rows[:, None], -math.inf)
        return products

    def bias_of(self, bias: Tensor) -> Tensor:
        """The columns of a bias, the rows of which are already those of the queries."""
        if bias.shape[-1] == 1:
            return bias
        return bias.index_select(-1, on(self.columns, bias.device))

    def dropout_mask(self, weights: Tensor) -> Tensor | None:
        """The scaled dropout mask of the weights; None without dropout."""
        drop = self.scores.drop
        if drop is None:
            return None
        leading = tuple(torch.arange(size) for size in drop.shape[:-2])
        region = TensorRegion((*leading, self.scores.rows, self.columns), drop.shape)
        keep = keep_mask(region, 1 - drop.p, drop.key, weights.device)
        return keep.to(weights.dtype) * (0.0 if drop.p == 1 else 1 / (1 - drop.p))


PartialResult = tuple[Tensor, Tensor]
"""A result (..., l, F) and its log-sum-exp (..., l)."""


def combine_results(before: PartialResult | None, block: PartialResult) -> PartialResult:
    """The result over two sets of keys, from those over each."""
    if before is None:
        return block
    (out, spread), (more, other) = before, block
    total = torch.logaddexp(spread, other)
    shift = total.masked_fill(total == -math.inf, 0)  # no visible key: the result is zero
    out = out * (spread - shift).exp().unsqueeze(-1)
    return out.addcmul_(more, (other - shift).exp().unsqueeze(-1)), total


def forward_block(
    block: Block, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> PartialResult:
    """Attention over the keys of a block; the result is float32 for half precision."""
    key, value = (_repeat_heads(x, query) for x in (key, value))
    if key.shape[-2] == 0 or query.numel() == 0:
        zeros = wide(query.new_zeros((*query.shape[:-1], value.shape[-1])))
        return zeros, zeros.new_full(query.shape[:-1], -math.inf)
    kernel = kernel_for(query, key, value) if bias is None and block.is_plain else None
    if kernel is not None:
        out, spread = kernel.forward(query, key, value, block.scores.factor)
        return wide(out), spread
    parts = [
        _forward_rows(some, query[..., rows, :], key, value, _rows_of(bias, rows))
        for some, rows in _rows(block, query, key)
    ]
    return torch.cat([out for out, _ in parts], -2), torch.cat([spread for _, spread in parts], -1)


def _forward_rows(
    block: Block, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> PartialResult:
    products = block.weigh(query, key, bias)
    largest = products.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0)
    weights = (products - largest).exp()
    total = weights.sum(-1, keepdim=True)
    dropout_mask = block.dropout_mask(weights)
    if dropout_mask is not None:
        weights = weights * dropout_mask
    out = wide(weights.to(value.dtype) @ value) / total.masked_fill(total == 0, 1)
    return out, (total.log() + largest).squeeze(-1)


def backward_block(
    block: Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor],
    grad_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values for the keys of a block.

    Args:
        given: the gradient of the result, the result, and its log-sum-exp, over all keys.
        grad_bias: accumulates the gradient of `bias`; or None.
    """
    if key.shape[-2] == 0 or query.numel() == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    keys, values = (_repeat_heads(x, query) for x in (key, value))
    kernel = kernel_for(query, keys, values) if bias is None and block.is_plain else None
    if kernel is not None:
        grads = kernel.backward(query, keys, values, saved, block.scores.factor)
    else:
        grads = _backward_by_rows(block, query, keys, values, bias, saved, grad_bias)
    grad_query, grad_keys, grad_values = grads
    return grad_query, _sum_heads(grad_keys, key), _sum_heads(grad_values, value)


def _backward_by_rows(
    block: Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor],
    grad_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out, spread = saved
    factor = block.scores.factor
    grad_query = torch.empty_like(query)
    grad_key, grad_value = (wide(torch.zeros_like(x)) for x in (key, value))
    spread = spread.masked_fill(spread == -math.inf, math.inf).unsqueeze(-1)
    for some, rows in _rows(block, query, key):
        own, own_grad = query[..., rows, :], grad[..., rows, :]
        weights = (some.weigh(own, key, _rows_of(bias, rows)) - spread[..., rows, :]).exp()
        dropout_mask = some.dropout_mask(weights)
        grad_weights = wide(own_grad @ value.transpose(-2, -1))
        dropped = weights
        if dropout_mask is not None:
            dropped, grad_weights = weights * dropout_mask, grad_weights * dropout_mask
        grad_value += wide(dropped.to(value.dtype).transpose(-2, -1) @ own_grad)
        along = (wide(own_grad) * wide(out[..., rows, :])).sum(-1, keepdim=True)
        products = weights * (grad_weights - along)
        if grad_bias is not None:
            _add_bias(some, grad_bias, products, rows)
        products = (products * factor).to(query.dtype)
        grad_query[..., rows, :] = products @ key
        grad_key += wide(products.transpose(-2, -1) @ own)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _add_bias(block: Block, grad_bias: Tensor, products: Tensor, rows: slice) -> None:
    """Add the gradient of some rows of a bias, which may have size 1 in any dim."""
    into = grad_bias if grad_bias.shape[-2] == 1 else grad_bias[..., rows, :]
    if grad_bias.shape[-1] == 1:
        into += products.sum_to_size(into.shape)
        return
    part = products.sum_to_size((*into.shape[:-1], products.shape[-1])).to(into.dtype)
    into.index_add_(-1, on(block.columns, into.device), part)


def _rows(block: Block, query: Tensor, key: Tensor) -> Iterator[tuple[Block, slice]]:
    """Chunks of queries, with no more products with the keys of a block than these have elements.

    On accelerators, where launches cost more, chunks may have up to `PIECE` products.
    """
    size, step = query.shape[-2], max(key.shape[-1], 16)
    if query.device.type not in ("cpu", "meta"):
        of_one = math.prod(query.shape[:-2]) * key.shape[-2]
        step = max(step, PIECE // max(of_one, 1))
    for start in range(0, size, step):
        stop = min(start + step, size)
        yield block.rows(start, stop), slice(start, stop)


def _rows_of(bias: Tensor | None, rows: slice) -> Tensor | None:
    return bias if bias is None or bias.shape[-2] == 1 else bias[..., rows, :]


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values repeated for all heads of queries that share them."""
    if x.dim() < 3 or x.shape[-3] == query.shape[-3]:
        return x
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)


def _sum_heads(grad: Tensor, x: Tensor) -> Tensor:
    if grad.shape == x.shape:
        return grad
    groups: Any = grad.unflatten(-3, (x.shape[-3], -1))  # type: ignore[no-untyped-call]
    summed: Tensor = groups.sum(-3)
    return summed
