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

from spatialdl.torch_internals import nn_functions, tree_map

HALF = (torch.float16, torch.bfloat16)

ON_GPU: frozenset[Callable[..., Any]] = frozenset(
    {
        *(F.interpolate, torch.norm, Tensor.norm, torch.linalg.vector_norm),
        *(torch.sum, Tensor.sum, torch.prod, Tensor.prod, torch.logsumexp, Tensor.logsumexp),
        *(torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod),
    }
)
ON_CPU: frozenset[Callable[..., Any]] = frozenset(
    {
        *(F.avg_pool3d, F.max_pool3d, torch.max_pool3d, F.adaptive_max_pool3d),
        *(F.adaptive_avg_pool3d, nn_functions.adaptive_avg_pool3d),
    }
)
PADS_ON_CPU = {"reflect": 2, "replicate": 3}  # up to this number of spatial dims


def as_autocast(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a function, cast as by autocast."""
    if func in ON_GPU and kwargs.get("dtype") is None and not _is_area(func, args, kwargs):
        args, kwargs = tree_map(_wide_on_gpu, (args, kwargs))
    if func in ON_CPU:
        args, kwargs = tree_map(_wide_on_cpu, (args, kwargs))
    return args, kwargs


def _is_area(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether it is interpolation by adaptive pooling, which autocast does not cast."""
    mode = kwargs.get("mode", args[3] if len(args) > 3 else None)
    return func is F.interpolate and mode == "area"


def in_float32(tile: Tensor) -> Tensor:
    """`tile`, cast as by autocast on a GPU for norms and softmax."""
    return _wide_on_gpu(tile)  # type: ignore[no-any-return]


def wide(x: Tensor) -> Tensor:
    """`x` in float32, PyTorch's accumulation type, if it is half precision."""
    return x.float() if x.dtype in HALF else x


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
    kind = one.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
