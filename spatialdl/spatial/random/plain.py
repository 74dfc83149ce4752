"""PyTorch's random functions, drawn from a stream of keys.

Each is implemented once, for any region of a whole tensor. `PLAIN` maps functions on whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.spatial.random.composite import by_name, numbers_of
from spatialdl.spatial.random.generator import (
    TensorRegion,
    bernoulli,
    exponential,
    keep_mask,
    normal,
    uniform,
)
from spatialdl.spatial.random.streams import full_region, next_key

_ALPHA = 1.7580993408473766  # Klambauer et al. (2017): negative limit of SELU


class _Masked(torch.autograd.Function):
    """``x * keep * scale``; saves the mask, one byte for each of its elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return x * (keep.to(x.dtype) * scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        return grad * (keep.to(grad.dtype) * ctx.scale), None, None


def drop_elements(
    x: Tensor, region: TensorRegion, key: int, p: float, channels: bool = False, alpha: bool = False
) -> Tensor:
    """Dropout of the region of a whole tensor.

    Args:
        channels: drop whole channels.
        alpha: preserve mean and variance (Klambauer et al., 2017).
    """
    if p == 1:
        return x * torch.zeros_like(x)
    keep = keep_mask(region.of_channels() if channels else region, 1 - p, key, x.device)
    if not alpha:
        masked: Tensor = _Masked.apply(x, keep, 1 / (1 - p))  # type: ignore[no-untyped-call]
        return masked
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    shift = keep.to(x.dtype).sub_(1).mul_(_ALPHA * scale).add_(_ALPHA * scale * p)
    masked = _Masked.apply(x, keep, scale)  # type: ignore[no-untyped-call]
    return masked + shift


def check_probability(p: float) -> None:
    """Check a dropout probability, with PyTorch's error."""
    if p < 0.0 or p > 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


# --- functions of a tensor, whole, split or divided


class Drawing(NamedTuple):
    """How numbers are drawn for the elements of a kind of tensor.

    Attributes:
        region: the region of the whole tensor that this rank holds.
        key: of the next call.
        tile: this rank's elements, differentiable.
        like: a tensor such as the given one, of new elements of this rank.
    """

    region: Callable[[Any], TensorRegion]
    key: Callable[[Any], int]
    tile: Callable[[Any], Tensor]
    like: Callable[[Any, Tensor], Tensor]


Functions = dict[Callable[..., Any], Callable[..., Any]]


def dropouts(on: Drawing) -> Functions:
    """The dropout functions that those of ``torch.nn.functional`` call."""
    table: Functions = {}
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"):
        dropout = _dropout(on, "feature" in name, "alpha" in name)
        table[getattr(torch, name)] = dropout
        table[getattr(torch, name + "_")] = _in_place_variant(dropout)
    return table


def _dropout(on: Drawing, channels: bool, alpha: bool) -> Callable[..., Tensor]:
    def dropout(input: Tensor, p: float, train: bool) -> Tensor:
        check_probability(p)
        if not train or p == 0 or input.numel() == 0:
            return input
        if channels and input.dim() < 2:
            raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
        region, key = on.region(input), on.key(input)
        return on.like(input, drop_elements(on.tile(input), region, key, p, channels, alpha))

    return dropout


def _in_place_variant(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def function_(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = function(input, *args, **kwargs)
        return input if y is input else input.copy_(y)

    return function_


def random_functions(on: Drawing) -> Functions:
    """All functions of a tensor that draw random numbers."""
    rand_like = _draw_like(on, uniform)

    def of_chances(input: Tensor, p: float | None = None, *, generator: None = None) -> Tensor:
        tile = on.tile(input).detach()
        chances = tile if p is None else torch.full_like(tile, p)
        return on.like(input, bernoulli(chances, on.region(input), on.key(input)))

    def bernoulli_(input: Tensor, p: Any = 0.5, *, generator: None = None) -> Tensor:
        tile = on.tile(input).detach()
        chances = torch.as_tensor(p, dtype=torch.float64, device=tile.device).expand(tile.shape)
        ones = bernoulli(chances, on.region(input), on.key(input))
        return input.copy_(on.like(input, ones.to(tile.dtype)))

    def rrelu(
        input: Tensor,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        generator: None = None,
    ) -> Tensor:
        """Saves signs and slopes for backward, not `input`, which may be overwritten."""
        slopes = rand_like(input) * (upper - lower) + lower if training else (lower + upper) / 2
        return torch.where(input > 0, input, input * slopes)

    return {
        **dropouts(on),
        torch.rand_like: rand_like,
        torch.randn_like: _draw_like(on, normal),
        torch.bernoulli: of_chances,
        Tensor.bernoulli: of_chances,
        Tensor.bernoulli_: bernoulli_,
        Tensor.uniform_: _fill(
            on, uniform, {"from": 0.0, "to": 1.0}, lambda x, low, high: x * (high - low) + low
        ),
        Tensor.normal_: _fill(
            on, normal, {"mean": 0.0, "std": 1.0}, lambda x, mean, std: x * std + mean
        ),
        Tensor.exponential_: _fill(on, exponential, {"lambd": 1.0}, lambda x, rate: x / rate),
        torch.rrelu: rrelu,
        torch.rrelu_: _in_place_variant(rrelu),
    }


def _draw_like(on: Drawing, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def draw_numbers(
        input: Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: Any = None,
        requires_grad: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        place = torch.device(device or input.device)
        tile = draw(on.region(input), on.key(input), dtype or input.dtype, place)
        return on.like(input, tile).requires_grad_(requires_grad)

    return draw_numbers


def _fill(
    on: Drawing,
    draw: Callable[..., Tensor],
    defaults: dict[str, float],
    scaled: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """A function that fills a tensor in place with numbers that its arguments scale."""

    def fill(input: Tensor, *args: float, **kwargs: Any) -> Tensor:
        given = {**defaults, **by_name(tuple(defaults), args, kwargs)}
        dtype = input.dtype if input.dtype.is_floating_point else torch.float64
        numbers = draw(on.region(input), on.key(input), dtype, input.device)
        numbers = scaled(numbers, *(given[name] for name in defaults))
        return input.copy_(on.like(input, numbers.to(input.dtype)))

    return fill


def _native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if not train and train is not None:
        return input, torch.ones_like(input, dtype=torch.bool)
    keep = keep_mask(full_region(input.shape), 1 - p, next_key(), input.device)
    y: Tensor = _Masked.apply(input, keep, 0.0 if p == 1 else 1 / (1 - p))  # type: ignore[no-untyped-call]
    return y, keep


# --- factories, and dropout of whole tensors


def _factory(draw: Callable[..., Tensor], function: Callable[..., Tensor]) -> Any:
    def factory(*size: Any, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        shape = tuple(numbers_of(size or (kwargs.pop("size"),)))
        like = torch.empty(0, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        if not like.is_floating_point() or kwargs.get("out") is not None:
            return function(*size, requires_grad=requires_grad, **kwargs)
        numbers = draw(full_region(shape), next_key(), like.dtype, like.device)
        return numbers.requires_grad_(requires_grad)

    return factory


# --- attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """`F.scaled_dot_product_attention`, with `drop` applied to the attention weights.

    Shared by whole and split tensors, so that both drop the same weights.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        if attn_mask is not None:
            raise RuntimeError("attention takes either attn_mask or is_causal, not both")
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        return drop(scores.softmax(-1)) @ value
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    else:
        scores = scores + attn_mask
    masked = scores.amax(-1, keepdim=True) == -math.inf  # as in PyTorch, the result is zero there
    weights = scores.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0)
    return drop(weights) @ value


def attention_of_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    mesh: Mesh | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` of tensors that all ranks of `mesh` hold whole."""
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    check_probability(dropout_p)
    return explicit_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, mesh
    )


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    mesh: Mesh | None,
) -> Tensor:
    """Attention with explicit weights, for tensors whose weights all ranks of `mesh` hold whole."""

    def drop(weights: Tensor) -> Tensor:
        if dropout_p == 0:
            return weights
        return drop_elements(weights, full_region(weights.shape), next_key(mesh), dropout_p)

    return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa, drop)


_PLAIN = Drawing(
    lambda x: full_region(x.shape), lambda x: next_key(), lambda x: x, lambda x, tile: tile
)
PLAIN: Functions = {
    **random_functions(_PLAIN),
    torch.native_dropout: _native_dropout,
    torch.rand: _factory(uniform, torch.rand),
    torch.randn: _factory(normal, torch.randn),
    F.scaled_dot_product_attention: attention_of_whole,
}
