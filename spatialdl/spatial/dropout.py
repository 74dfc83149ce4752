"""Dropout and random numbers on a split image: each rank draws those of its own pixels.

``F.dropout`` and related functions are written in Python; the functions that they call are
registered here. Whole channels are dropped consistently on all ranks. `spatialdl.random` generates
the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spatialdl.random.generator import TensorRegion, bernoulli, exponential, normal, uniform
from spatialdl.random.plain import (
    check_probability,
    dropped,
    float_type,
    in_place_variant,
    rrelu_with,
)
from spatialdl.random.streams import next_key
from spatialdl.spatial.span import positions, without_dims
from spatialdl.spatial.tensor import SpatialTensor, refusal, register_op, to_tile


def region_of(x: SpatialTensor) -> TensorRegion:
    """The region of the whole tensor that the tile of `x` covers."""
    return TensorRegion(tuple(positions(x, dim) for dim in range(x.dim())), tuple(x.shape))


def _register(name: str, channels: bool, alpha: bool) -> None:
    @register_op(getattr(torch, name), split=("input",), prefix=True)
    def dropout(input: SpatialTensor, p: float, train: bool) -> Tensor:
        check_probability(p)
        if not train or p == 0:
            return input
        key = next_key(input.mesh)
        return without_dims(
            input, dropped(to_tile(input), region_of(input), key, p, channels, alpha), ()
        )

    @register_op(getattr(torch, name + "_"), split=("input",), prefix=True)
    def dropout_(input: SpatialTensor, p: float, train: bool) -> Tensor:
        y = dropout(input, p, train)
        return input if y is input else input.copy_(y)


_register("dropout", channels=False, alpha=False)
_register("feature_dropout", channels=True, alpha=False)
_register("alpha_dropout", channels=False, alpha=True)
_register("feature_alpha_dropout", channels=True, alpha=True)


def _register_like(func: Any, draw: Callable[..., Tensor]) -> None:
    @register_op(func, split=("input",), prefix=True)
    def drawn(
        input: SpatialTensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: Any = None,
        requires_grad: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        if device is not None and torch.device(device).type != input.device.type:
            raise refusal(func, [input], f"draw on {input.device} and move the result")
        key = next_key(input.mesh)
        tile = draw(region_of(input), key, dtype or input.dtype, input.device)
        return without_dims(input, tile, ()).requires_grad_(requires_grad)


_register_like(torch.rand_like, uniform)
_register_like(torch.randn_like, normal)


@register_op(torch.bernoulli, Tensor.bernoulli, prefix=True)
def split_bernoulli(
    input: SpatialTensor, p: float | None = None, *, generator: torch.Generator | None = None
) -> Tensor:
    _no_generator(torch.bernoulli, input, generator)
    tile = input.to_local().detach()
    chances = tile if p is None else torch.full_like(tile, p)
    return without_dims(input, bernoulli(chances, region_of(input), next_key(input.mesh)), ())


def _no_generator(func: Any, x: SpatialTensor, generator: torch.Generator | None) -> None:
    if generator is not None:
        raise refusal(func, [x], "it draws from spatialdl.random.keyed, not from a generator")


@register_op(Tensor.bernoulli_, split=("input",), prefix=True)
def bernoulli_(
    input: SpatialTensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> Tensor:
    _no_generator(Tensor.bernoulli_, input, generator)
    tile = input.to_local().detach()
    chances = torch.full(tile.shape, p, dtype=torch.float64, device=tile.device)
    ones = bernoulli(chances, region_of(input), next_key(input.mesh)).to(tile.dtype)
    return input.copy_(without_dims(input, ones, ()))


def _register_in_place(func: Any, draw: Callable[..., Tensor], is_range: bool) -> None:
    @register_op(func, prefix=True)
    def drawn_(input: SpatialTensor, first: float = 0.0, second: float = 1.0, **names: Any) -> Any:
        _no_generator(func, input, names.get("generator"))
        first = names.get("from", names.get("mean", first))
        second = names.get("to", names.get("std", second))
        key = next_key(input.mesh)
        numbers = draw(region_of(input), key, float_type(input.dtype), input.device)
        numbers = numbers * (second - first if is_range else second) + first
        return input.copy_(without_dims(input, numbers.to(input.dtype), ()))


_register_in_place(Tensor.uniform_, uniform, is_range=True)
_register_in_place(Tensor.normal_, normal, is_range=False)


@register_op(Tensor.exponential_, split=("input",), prefix=True)
def exponential_(
    input: SpatialTensor, lambd: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    _no_generator(Tensor.exponential_, input, generator)
    key = next_key(input.mesh)
    numbers = exponential(region_of(input), key, float_type(input.dtype), input.device) / lambd
    return input.copy_(without_dims(input, numbers.to(input.dtype), ()))


@register_op(torch.rrelu, split=("input",), prefix=True)
def rrelu(
    input: SpatialTensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor:
    return rrelu_with(torch.rand_like, input, lower, upper, training)


register_op(torch.rrelu_, split=("input",), prefix=True)(in_place_variant(rrelu))
