"""Dropout and random numbers on a split image: each rank draws those of its own pixels.

``F.dropout`` and related functions are written in Python; the functions that they call are
registered here. Whole channels are dropped consistently on all ranks. `spatialdl.random` generates
the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from spatialdl.random.generator import TensorRegion
from spatialdl.random.plain import Drawing, random_functions
from spatialdl.random.streams import next_key
from spatialdl.spatial.span import positions, without_dims
from spatialdl.spatial.tensor import SpatialTensor, refusal, register_op, to_tile


def region_of(x: SpatialTensor) -> TensorRegion:
    """The region of the whole tensor that the tile of `x` covers."""
    return TensorRegion(tuple(positions(x, dim) for dim in range(x.dim())), tuple(x.shape))


def _register(function: Callable[..., Any], handler: Callable[..., Tensor]) -> None:
    @register_op(function, split=("input",), prefix=True)
    @wraps(handler)
    def drawn(input: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("generator") is not None:
            advice = "it draws from spatialdl.random.keyed, not from a generator"
            raise refusal(function, [input], advice)
        return handler(input, *args, **kwargs)


_SPLIT = Drawing(
    region_of, lambda x: next_key(x.mesh), to_tile, lambda x, tile: without_dims(x, tile, ())
)
for _function, _handler in random_functions(_SPLIT).items():
    _register(_function, _handler)
