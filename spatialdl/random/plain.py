"""PyTorch's random functions, drawn from a stream of keys.

Each is implemented once, for any region of a whole tensor. `PLAIN` maps functions on whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.random.generator import (
    TensorRegion,
    bernoulli,
    exponential,
    keep_mask,
    normal,
    uniform,
)
from spatialdl.random.streams import next_key, whole

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


def dropped(
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


def _dropout(channels: bool = False, alpha: bool = False, unbatched: int = 0) -> Any:
    """`unbatched`: number of dims of an input without a batch dim; 0 if not supported."""

    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        check_probability(p)
        if not training or p == 0 or input.numel() == 0:
            return input
        x = input.unsqueeze(0) if input.dim() == unbatched else input
        if channels and x.dim() < 2:
            raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
        y = dropped(x, whole(x.shape), next_key(), p, channels, alpha).view(input.shape)
        return input.copy_(y) if inplace else y

    return dropout


def _in_place(function: Callable[..., Tensor]) -> Any:
    def dropout_(input: Tensor, p: float, train: bool) -> Tensor:
        return function(input, p, train, True)

    return dropout_


def _by_position(function: Callable[..., Tensor]) -> Any:
    def dropout(input: Tensor, p: float, train: bool) -> Tensor:
        return function(input, p, train)

    return dropout


def _native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if not train and train is not None:
        return input, torch.ones_like(input, dtype=torch.bool)
    keep = keep_mask(whole(input.shape), 1 - p, next_key(), input.device)
    y: Tensor = _Masked.apply(input, keep, 0.0 if p == 1 else 1 / (1 - p))  # type: ignore[no-untyped-call]
    return y, keep


# --- factories


def _shape(size: tuple[Any, ...]) -> Sequence[int]:
    return size if not size or isinstance(size[0], int) else tuple(size[0])


def _factory(draw: Callable[..., Tensor], function: Callable[..., Tensor]) -> Any:
    def factory(*size: Any, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        shape = _shape(size or (kwargs.pop("size"),))
        like = torch.empty(0, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        if not like.is_floating_point() or kwargs.get("out") is not None:
            return function(*size, requires_grad=requires_grad, **kwargs)
        numbers = draw(whole(shape), next_key(), like.dtype, like.device)
        return numbers.requires_grad_(requires_grad)

    return factory


def _factory_like(draw: Callable[..., Tensor]) -> Any:
    def factory(
        input: Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        **_: Any,
    ) -> Tensor:
        place = torch.device(device or input.device)
        numbers = draw(whole(input.shape), next_key(), dtype or input.dtype, place)
        return numbers.requires_grad_(requires_grad)

    return factory


def _bernoulli(input: Tensor, p: float | None = None, *, generator: None = None) -> Tensor:
    chances = input.detach() if p is None else torch.full_like(input, p)
    return bernoulli(chances, whole(input.shape), next_key())


def _bernoulli_(self: Tensor, p: Any = 0.5, *, generator: None = None) -> Tensor:
    chances = torch.as_tensor(p, dtype=torch.float64, device=self.device).expand(self.shape)
    return self.copy_(bernoulli(chances, whole(self.shape), next_key()))


def float_type(dtype: torch.dtype) -> torch.dtype:
    """Dtype of numbers that are drawn for a tensor of `dtype`."""
    return dtype if dtype.is_floating_point else torch.float64


def _uniform_(self: Tensor, from_: float = 0, to: float = 1, **kwargs: Any) -> Tensor:
    low, high = kwargs.get("from", from_), to
    numbers = uniform(whole(self.shape), next_key(), float_type(self.dtype), self.device)
    return self.copy_(numbers * (high - low) + low)


def _normal_(self: Tensor, mean: float = 0, std: float = 1, *, generator: None = None) -> Tensor:
    numbers = normal(whole(self.shape), next_key(), float_type(self.dtype), self.device)
    return self.copy_(numbers * std + mean)


def _exponential_(self: Tensor, lambd: float = 1, *, generator: None = None) -> Tensor:
    numbers = exponential(whole(self.shape), next_key(), float_type(self.dtype), self.device)
    return self.copy_(numbers / lambd)


def rrelu_with(
    rand_like: Callable[[Tensor], Tensor], input: Tensor, lower: float, upper: float, training: bool
) -> Tensor:
    """`torch.rrelu` of a whole or a split tensor, depending on `rand_like`.

    Saves signs and slopes for backward, not `input`, which may be overwritten.
    """
    slopes = rand_like(input) * (upper - lower) + lower if training else (lower + upper) / 2
    return torch.where(input > 0, input, input * slopes)


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **_: None
) -> Tensor:
    return rrelu_with(_factory_like(uniform), input, lower, upper, training)


def in_place_variant(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In-place variant of a function of one tensor."""

    def function_(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input.copy_(function(input, *args, **kwargs))

    return function_


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
        return dropped(weights, whole(weights.shape), next_key(mesh), dropout_p)

    return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa, drop)


_PIXELS, _CHANNELS = _dropout(), _dropout(channels=True)
_ALPHA_PIXELS = _dropout(alpha=True)
_ALPHA_CHANNELS = _dropout(channels=True, alpha=True)

PLAIN: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _PIXELS,
    F.dropout1d: _dropout(channels=True, unbatched=2),
    F.dropout2d: _CHANNELS,
    F.dropout3d: _dropout(channels=True, unbatched=4),
    F.alpha_dropout: _ALPHA_PIXELS,
    F.feature_alpha_dropout: _ALPHA_CHANNELS,
    torch.dropout: _by_position(_PIXELS),
    torch.dropout_: _in_place(_PIXELS),
    torch.feature_dropout: _by_position(_CHANNELS),
    torch.feature_dropout_: _in_place(_CHANNELS),
    torch.alpha_dropout: _by_position(_ALPHA_PIXELS),
    torch.alpha_dropout_: _in_place(_ALPHA_PIXELS),
    torch.feature_alpha_dropout: _by_position(_ALPHA_CHANNELS),
    torch.feature_alpha_dropout_: _in_place(_ALPHA_CHANNELS),
    torch.native_dropout: _native_dropout,
    torch.rand: _factory(uniform, torch.rand),
    torch.randn: _factory(normal, torch.randn),
    torch.rand_like: _factory_like(uniform),
    torch.randn_like: _factory_like(normal),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
    torch.rrelu: _rrelu,
    torch.rrelu_: in_place_variant(_rrelu),
    F.scaled_dot_product_attention: attention_of_whole,
}
