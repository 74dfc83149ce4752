"""BatchNorm with the statistics of the whole image.

Each rank takes mean and variance of its tile; counts, means and squared deviations are combined in
float64 (Chan, Golub, LeVeque 1979), never as raw sums of squares, which in float32 are off by
1e-2 where the mean is 1,000 times the deviation. The same bits come out on every rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import gather_over_ranks, sum_over_ranks
from spatialdl.mesh import Mesh
from spatialdl.spatial.tensor import SpatialTensor, from_tile, register_op, to_tile
from spatialdl.spatial.window import check_image

aten = torch.ops.aten


class Moments(NamedTuple):
    """Per channel, float64: mean and biased variance over `pixels` pixels."""

    pixels: int
    mean: Tensor
    variance: Tensor


def global_moments(tile: Tensor, count: int, comm: Communicator) -> Moments:
    """Mean and variance over the tiles of all ranks.

    Args:
        tile: (N, C, h, w); may be empty.
        count: pixels per channel on all ranks together.
    """
    mean, variance = _tile_moments(tile)
    if tile.device.type == "meta" or comm.size == 1:
        return Moments(count, mean, variance)
    own = tile.numel() // max(tile.shape[1], 1)
    message = torch.cat([mean.new_full((1,), own), mean, variance])
    gathered = gather_over_ranks(comm, message, "batch_norm statistics")
    channels = tile.shape[1]
    counts, means, variances = torch.split(gathered, [1, channels, channels], dim=1)
    mean = (counts * means).sum(0) / count
    variance = (counts * (variances + (means - mean).square())).sum(0) / count
    return Moments(count, mean, variance)


def _tile_moments(tile: Tensor) -> tuple[Tensor, Tensor]:
    if tile.numel() == 0:
        zeros = tile.new_zeros(tile.shape[1], dtype=torch.float64)
        return zeros, zeros
    if tile.device.type == "cpu":  # Welford's method in one pass, twice as fast as var_mean
        mean, variance = torch.batch_norm_update_stats(tile, None, None, 0.0)
    else:
        variance, mean = torch.var_mean(tile, (0, 2, 3), correction=0)
    return mean.double(), variance.double()


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tile: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: Moments,
        eps: float,
        mesh: Mesh,
    ) -> Tensor:
        ctx.mesh, ctx.eps, ctx.count = mesh, eps, moments.pixels
        mean, variance = moments.mean.to(tile.dtype), moments.variance.to(tile.dtype)
        ctx.save_for_backward(tile, weight, mean, variance)
        return _normalise(tile, weight, bias, mean, variance, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tile, weight, mean, variance = ctx.saved_tensors
        grad_weight, grad_bias = _sums(grad, tile, mean, variance, ctx.eps)
        needs_tile, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_tile = None
        if needs_tile:
            sums = torch.cat([grad_bias, grad_weight]).double()
            totals = sum_over_ranks(ctx.mesh.grid_comm, sums, "batch_norm backward") / ctx.count
            grad_tile = _grad_tile(grad, tile, weight, mean, variance, ctx.eps, totals)
        return (
            grad_tile,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            None,
            None,
            None,
        )


def _normalise(
    tile: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
) -> Tensor:
    if tile.numel() == 0:
        return torch.empty_like(tile)
    return torch.batch_norm(tile, weight, bias, mean, variance, False, 0.0, eps, False)


def _sums(
    grad: Tensor, tile: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Sums of ``grad * (x - mean) / std`` and of ``grad`` over this tile, per channel."""
    if tile.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    none = mean.new_empty(0)
    ones = torch.ones_like(mean)
    _, grad_weight, grad_bias = aten.native_batch_norm_backward(
        grad, tile, ones, mean, variance, none, none, False, eps, [False, True, True]
    )
    return grad_weight, grad_bias


def _grad_tile(
    grad: Tensor,
    tile: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    totals: Tensor,
) -> Tensor:
    """Ioffe and Szegedy (2015), section 3: the gradient through the statistics too."""
    if tile.numel() == 0:
        return torch.empty_like(tile)
    mean_grad, mean_projection = totals.to(tile.dtype).chunk(2)
    scale = (variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    # in two passes: -scale * (mean_projection * normalised x + mean_grad), then + scale * grad
    result = torch.batch_norm(
        tile, -scale * mean_projection, -scale * mean_grad, mean, variance, False, 0.0, eps, False
    )
    return result.addcmul_(grad, scale.view(1, -1, 1, 1))


@register_op(F.batch_norm)
def batch_norm(
    input: SpatialTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    check_image("batch_norm", input)
    tile, layout, mesh = to_tile(input), input.spatial_layout, input.mesh
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError("batch_norm in evaluation needs running statistics")
        return from_tile(
            F.batch_norm(tile, running_mean, running_var, weight, bias, False, momentum, eps),
            layout,
            mesh,
        )
    count = input.numel() // input.shape[1]
    if count == 1:
        raise ValueError(
            f"batch_norm needs more than one value per channel to train, got {tuple(input.shape)}"
        )
    with torch.no_grad():
        moments = global_moments(tile, count, mesh.grid_comm)
        _update_running(moments, running_mean, running_var, momentum)
    normalised = _BatchNorm.apply(tile, weight, bias, moments, eps, mesh)  # type: ignore[no-untyped-call]
    return from_tile(normalised, layout, mesh)


def _update_running(
    moments: Moments, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> None:
    unbiased = moments.variance * (moments.pixels / (moments.pixels - 1))
    for running, value in ((running_mean, moments.mean), (running_var, unbiased)):
        if running is not None:
            running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)
