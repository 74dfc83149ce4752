"""Operations on the ``meta`` device, of which the shape of the result is worked out once.

Networks repeat themselves, and much of PyTorch's ``meta`` device is written in Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Known = dict[Any, Any]


class _Empty:
    """How a result looks."""

    def __init__(self, like: Tensor) -> None:
        self.size, self.stride, self.dtype = like.size(), like.stride(), like.dtype

    def made(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


def run(func: Any, args: Any, kwargs: Any, known: Known) -> Any:
    """``func(*args, **kwargs)``; where all operands are on ``meta``, maybe without calling it.

    Args:
        known: results of earlier operations, to which this one's is added.
    """
    tensors = tensors_in((args, *kwargs.values()))
    if func.is_view or not tensors or any(one.device.type != "meta" for one in tensors):
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        in_place = str(func._overloadpacket.__name__).endswith("_") and len(func._schema.returns)
        return args[0] if in_place == 1 else func(*args, **kwargs)
    key = (func, _key(args), _key(sorted(kwargs.items())))
    if key not in known:
        result = func(*args, **kwargs)
        owned = {one.untyped_storage()._cdata for one in tensors}
        if any(one.untyped_storage()._cdata in owned for one in tensors_in(result)):
            return result  # a view after all
        known[key] = _without_memory(result)
        return result
    return _made(known[key])


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in what operations take and give."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in tensors_in(one)]
    return []


def _without_memory(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_without_memory(one) for one in value)
    return _Empty(value) if isinstance(value, Tensor) else value


def _made(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_made(one) for one in value)
    return value.made() if isinstance(value, _Empty) else value


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_key(one) for one in value)
    return value
