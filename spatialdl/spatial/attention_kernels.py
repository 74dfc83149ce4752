"""PyTorch's fused attention kernels that return the log-sum-exp, by device type.

They support a scale factor, but no bias, causal mask or dropout here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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
