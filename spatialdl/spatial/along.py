"""Sorting, cumulative sums and order statistics along dims that are not split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spatialdl.spatial.span import checked, dims_of, split_dims, without_dims
from spatialdl.spatial.tensor import SpatialTensor, refusal, register_op, to_tile

Function = Callable[..., Any]

# Position of `dim` in the arguments, and its default (None: no default).
_ALONG: dict[str, tuple[int, int | None]] = {
    "cumsum": (1, None),
    "cumprod": (1, None),
    "cummax": (1, None),
    "cummin": (1, None),
    "logcumsumexp": (1, None),
    "sort": (1, -1),
    "argsort": (1, -1),
    "topk": (2, -1),
    "kthvalue": (2, -1),
    "median": (1, None),
    "nanmedian": (1, None),
    "mode": (1, -1),
    "quantile": (2, None),
    "nanquantile": (2, None),
}
_REMOVES = {"kthvalue": 3, "median": 2, "nanmedian": 2, "mode": 2}  # position of `keepdim`


def _register(func: Function, name: str) -> None:
    place, default = _ALONG[name]

    def along(func: Function, x: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[place - 1] if len(args) >= place else default)
        if isinstance(dim, bool):  # sort(input, descending)
            dim = default
        if dim is None or name.endswith("quantile") or dim % x.dim() in split_dims(x):
            raise refusal(
                func,
                [x],
                f"it needs all pixels along dim {dim} on one rank; use dims of samples or "
                "channels, or call full_tensor() before it",
            )
        removed: tuple[int, ...] = ()
        if name in _REMOVES:
            where = _REMOVES[name] - 1
            keepdim = kwargs.get("keepdim", args[where] if len(args) > where else False)
            removed = () if keepdim else dims_of(x, dim)
        result = func(to_tile(x), *args, **kwargs)
        if isinstance(result, Tensor):
            return without_dims(x, result, removed)
        return tuple(without_dims(x, value, removed) for value in result)

    register_op(func)(checked(func, along))


for _name in _ALONG:
    for _holder in (torch, Tensor):
        _register(getattr(_holder, _name), _name)
