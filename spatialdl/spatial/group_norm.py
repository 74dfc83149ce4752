"""GroupNorm and InstanceNorm with the statistics of the whole image.

The channels of all samples become those of one sample, (1, N*C, ...), so that BatchNorm's kernels
compute the result in one pass. Statistics are those of (1, N*G, ...).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.reduce import sum_over_ranks
from spatialdl.spatial.autocast import in_float32
from spatialdl.spatial.norm import (
    ChannelMoments,
    check_channels,
    global_moments,
    gradient_of_tile,
    gradient_sums,
    normalised,
    update_running,
)
from spatialdl.spatial.span import on_meta, split_dims, without_dims
from spatialdl.spatial.tensor import SpatialTensor, refusal, register_op, to_tile


def _as_channels(tile: Tensor, channels: int) -> Tensor:
    """(N, C, ...) as (1, `channels`, rest); `channels` is N times a divisor of C."""
    return tile.reshape(1, channels, tile.numel() // max(channels, 1))


def _per_channel(values: Tensor, channels: int) -> Tensor:
    """Values per group as values per channel."""
    return values.repeat_interleave(channels // max(values.numel(), 1))


def _per_sample(values: Tensor | None, samples: int) -> Tensor | None:
    return None if values is None else values.repeat(samples)


class _GroupNorm(torch.autograd.Function):
    """Saves the tile and its statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        tile: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: ChannelMoments,
        eps: float,
        mesh: Mesh,
    ) -> Tensor:
        samples, channels = tile.shape[:2]
        mean, variance = moments.of(tile)
        ctx.save_for_backward(tile, weight, mean, variance)
        ctx.mesh, ctx.eps, ctx.count = mesh, eps, moments.pixels
        y = normalised(
            _as_channels(tile, samples * channels),
            _per_sample(weight, samples),
            _per_sample(bias, samples),
            _per_channel(mean, samples * channels),
            _per_channel(variance, samples * channels),
            eps,
        )
        return y.view(tile.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tile, weight, mean, variance = ctx.saved_tensors
        samples, channels = tile.shape[:2]
        every = samples * channels
        statistics = _per_channel(mean, every), _per_channel(variance, every)
        x, g = _as_channels(tile, every), _as_channels(grad, every)
        projections, sums = gradient_sums(g, x, *statistics, ctx.eps)
        needs_tile, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_tile = None
        if needs_tile:
            scale = _per_sample(weight, samples)
            parts = torch.stack([sums, projections]).double()
            if scale is not None:
                parts = parts * scale
            groups = parts.view(2, mean.numel(), -1).sum(2)
            totals = sum_over_ranks(ctx.mesh.grid_comm, groups, "group_norm backward") / ctx.count
            spread = torch.cat([_per_channel(total, every) for total in totals])
            grad_tile = gradient_of_tile(g, x, scale, *statistics, ctx.eps, spread)
            grad_tile = grad_tile.view(tile.shape)
        return (
            grad_tile,
            projections.view(samples, channels).sum(0) if needs_weight else None,
            sums.view(samples, channels).sum(0) if needs_bias else None,
            None,
            None,
            None,
        )


def _check(name: str, x: SpatialTensor) -> None:
    check_channels(name, x)
    if 0 in split_dims(x):
        raise refusal(name, [x], "its samples are merged with rows and columns")


def _group_moments(x: SpatialTensor, tile: Tensor, groups: int, name: str) -> ChannelMoments:
    every = x.shape[0] * groups
    count = x.numel() // max(every, 1)
    with torch.no_grad():
        return global_moments(_as_channels(tile, every), count, x.mesh.grid_comm, name)


@register_op(F.group_norm, torch.group_norm, split=("input",))
def group_norm(
    input: SpatialTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # torch.group_norm only
) -> Tensor:
    _check("group_norm", input)
    on_meta(F.group_norm, input, num_groups)  # raises PyTorch's errors on all ranks
    tile = in_float32(to_tile(input))
    moments = _group_moments(input, tile, num_groups, "group_norm")
    y = _GroupNorm.apply(tile, weight, bias, moments, eps, input.mesh)  # type: ignore[no-untyped-call]
    return without_dims(input, y, ())


@register_op(F.instance_norm, split=("input",))
def instance_norm(
    input: SpatialTensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    _check("instance_norm", input)
    if not use_input_stats:
        tile = to_tile(input)
        y = F.instance_norm(tile, running_mean, running_var, weight, bias, False, momentum, eps)
        return without_dims(input, y, ())
    on_meta(F.instance_norm, input)
    tile = to_tile(input)
    moments = _group_moments(input, tile, input.shape[1], "instance_norm")
    if running_mean is not None or running_var is not None:
        update_running(_mean_over_samples(moments, input), running_mean, running_var, momentum)
    y = _GroupNorm.apply(tile, weight, bias, moments, eps, input.mesh)  # type: ignore[no-untyped-call]
    return without_dims(input, y, ())


def _mean_over_samples(moments: ChannelMoments, x: SpatialTensor) -> ChannelMoments:
    mean, variance = (v.view(x.shape[:2]).mean(0) for v in (moments.mean, moments.variance))
    return ChannelMoments(moments.pixels, mean, variance)


@register_op(torch.instance_norm, split=("input",))
def torch_instance_norm(
    input: SpatialTensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


@register_op(F.local_response_norm, split=("input",))
def local_response_norm(
    input: SpatialTensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """Normalisation over neighbouring channels of a pixel; local."""
    _check("local_response_norm", input)
    y = F.local_response_norm(to_tile(input), size, alpha, beta, k)
    return without_dims(input, y, ())
