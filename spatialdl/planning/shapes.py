"""Operations on the ``meta`` device with cached result shapes.

Networks repeat operations, and much of PyTorch's ``meta`` device is slow Python code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Known = dict[Any, Any]


class _Empty:
    """Size, stride and dtype of a result."""

    def __init__(self, like: Tensor) -> None:
        self.size, self.stride, self.dtype = like.size(), like.stride(), like.dtype

    def made(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


def run(func: Any, args: Any, kwargs: Any, known: Known) -> Any:
    """Return ``func(*args, **kwargs)``, from the cache if all operands are on ``meta``.

    Args:
        known: the cache, to which the result is added.
    """
    tensors = tensors_in((args, *kwargs.values()))
    if func.is_view or not tensors or any(tensor.device.type != "meta" for tensor in tensors):
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        in_place = str(func._overloadpacket.__name__).endswith("_") and len(func._schema.returns)
        return args[0] if in_place == 1 else func(*args, **kwargs)
    key = (func, _key(args), _key(sorted(kwargs.items())))
    if key not in known:
        result = func(*args, **kwargs)
        owned = {tensor.untyped_storage()._cdata for tensor in tensors}
        if any(tensor.untyped_storage()._cdata in owned for tensor in tensors_in(result)):
            return result  # an undeclared view
        known[key] = _without_memory(result)
        return result
    return _made(known[key])


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among operands or results."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _without_memory(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_without_memory(item) for item in value)
    return _Empty(value) if isinstance(value, Tensor) else value


def _made(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_made(item) for item in value)
    return value.made() if isinstance(value, _Empty) else value


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_key(item) for item in value)
    return value
