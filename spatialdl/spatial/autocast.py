"""Autocast to float32 for handlers that call other kernels than PyTorch does.

Ranks without pixels call no kernel at all, so inputs are cast before the handler. The lists are
PyTorch's ``AT_FORALL_FP32`` in ``ATen/autocast_mode.h``; the one for CPUs is shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.spatial.random.composite import argument, functions_of
from spatialdl.torch_internals import nn_functions, tree_map

HALF = (torch.float16, torch.bfloat16)

ON_GPU: frozenset[Callable[..., Any]] = frozenset(
    {
        F.interpolate,
        torch.linalg.vector_norm,
        *functions_of(torch, "norm sum prod logsumexp cumsum cumprod"),
        *functions_of(Tensor, "norm sum prod logsumexp cumsum cumprod"),
    }
)
ON_CPU: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.max_pool3d,
        nn_functions.adaptive_avg_pool3d,
        *functions_of(F, "avg_pool3d max_pool3d adaptive_max_pool3d adaptive_avg_pool3d"),
    }
)
PADS_ON_CPU = {"reflect": 2, "replicate": 3}  # up to this number of spatial dims


def is_enabled(kind: str) -> bool:
    """Whether autocast is enabled on a type of devices."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def as_autocast(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a function, cast as by autocast."""
    if func in ON_GPU and kwargs.get("dtype") is None and not _is_area(func, args, kwargs):
        args, kwargs = tree_map(_wide_on_gpu, (args, kwargs))
    if func in ON_CPU:
        args, kwargs = tree_map(_wide_on_cpu, (args, kwargs))
    return args, kwargs


def _is_area(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether it is interpolation by adaptive pooling, which autocast does not cast."""
    return func is F.interpolate and argument("mode", 3, args, kwargs) == "area"


def autocast_cast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Operands of a convolution or product in the dtype that autocast casts them to.

    Cast before the exchange: half as many bytes are sent, and backward gets the same operands as
    forward.
    """
    kind = next(x.device.type for x in tensors if x is not None)
    if not is_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def in_float32(tile: Tensor) -> Tensor:
    """`tile`, cast as by autocast on a GPU for norms and softmax."""
    return _wide_on_gpu(tile)  # type: ignore[no-any-return]


def wide(x: Tensor) -> Tensor:
    """`x` in float32, PyTorch's accumulation type, if it is half precision."""
    return x.float() if x.dtype in HALF else x


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """float32, PyTorch's accumulation type, for half precision; else `dtype`."""
    return torch.float32 if dtype in HALF else dtype


def padded_as(x: Tensor, mode: str) -> Tensor:
    """`x`, cast as by autocast on a CPU for padding."""
    if x.dim() - 2 <= PADS_ON_CPU.get(mode, 0):
        return _wide_on_cpu(x)  # type: ignore[no-any-return]
    return x


def _wide_on_gpu(one: Any) -> Any:
    """Cast on any accelerator: PyTorch has one list for all of them."""
    return one.float() if _is_cast(one) and one.device.type != "cpu" else one


def _wide_on_cpu(one: Any) -> Any:
    return one.float() if _is_cast(one) and one.device.type == "cpu" else one


def _is_cast(one: Any) -> bool:
    """Whether it is a half-precision tensor on a device with autocast enabled."""
    if not isinstance(one, Tensor) or one.dtype not in HALF:
        return False
    return is_enabled(one.device.type)
