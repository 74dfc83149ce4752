"""BatchNorm, GroupNorm and InstanceNorm with the statistics of the whole image.

Each rank computes mean and variance of its tile. Counts, means and squared deviations are combined
in float64 (Chan, Golub, LeVeque 1979). Raw sums of squares in float32 would be off by 1e-2 where
the mean is 1,000 times the deviation. The result is bitwise equal on all ranks.

For GroupNorm the channels of all samples become those of one sample, (1, N*C, ...), so that
BatchNorm's kernels compute the result in one pass. Statistics are those of (1, N*G, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.reduce import gather_over_ranks, sum_over_ranks
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout.layout import image_shape
from spatialdl.spatial.autocast import in_float32, wide, wide_type
from spatialdl.spatial.constants import constant
from spatialdl.spatial.span import split_dims, without_dims
from spatialdl.spatial.tensor import SpatialTensor, refusal, register_op, to_tile
from spatialdl.torch_internals import foreach_lerp_

aten = torch.ops.aten


class ChannelMoments(NamedTuple):
    """Mean and biased variance over `pixels` pixels per channel; float64.

    A rank that does not know the count has it as a float64 tensor (), so that the host does not
    synchronise.
    """

    pixels: float | Tensor
    mean: Tensor
    variance: Tensor

    def of(self, tile: Tensor) -> ChannelMoments:
        """These moments in the dtype that normalises `tile`, never half precision."""
        dtype = wide_type(tile.dtype)
        return self._replace(mean=self.mean.to(dtype), variance=self.variance.to(dtype))


def global_moments(
    tile: Tensor, count: int | None, comm: Communicator, name: str
) -> ChannelMoments:
    """Mean and variance over the tiles of all ranks.

    Args:
        tile: (N, C, ...); may be empty.
        count: pixels per channel on all ranks together; None if unknown.
    """
    mean, variance = _tile_moments(tile)
    own = tile.numel() // max(tile.shape[1], 1)
    if comm.size == 1:
        return ChannelMoments(own if count is None else count, mean.double(), variance.double())
    held = constant(float(own), 1, torch.float64, tile.device)
    message = torch.cat([held, mean, variance])  # promoted to the widest dtype
    gathered = gather_over_ranks(comm, message, f"{name} statistics")
    counts, statistics, channels = gathered[:, 0], gathered[:, 1:], tile.shape[1]
    pixels = counts.sum() if count is None else count
    shares = counts / pixels
    mean, variance = torch.mv(statistics.t(), shares).chunk(2)
    deviations = statistics[:, :channels] - mean
    return ChannelMoments(pixels, mean, torch.addmv(variance, deviations.square_().t(), shares))


def _tile_moments(tile: Tensor) -> tuple[Tensor, Tensor]:
    if tile.numel() == 0:
        zeros = tile.new_zeros(tile.shape[1], dtype=torch.float64)
        return zeros, zeros
    if not tile.is_cuda:  # where the results are never half precision
        tile = wide(tile)
    if tile.is_cuda or tile.is_cpu:  # Welford's method in one pass, twice as fast as var_mean
        mean, variance = torch.batch_norm_update_stats(tile, None, None, 0.0)
    else:
        dims = tuple(d for d in range(tile.dim()) if d != 1)
        variance, mean = torch.var_mean(tile, dims, correction=0)
    return mean, variance


class Standardize(torch.autograd.Function):
    """Saves the tile and its statistics, of each channel or of groups of consecutive channels.

    `add_up` sums (2, statistics) over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tile: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: ChannelMoments,
        eps: float,
        add_up: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.add_up, ctx.eps, ctx.count = add_up, eps, moments.pixels
        _, mean, variance = moments
        ctx.save_for_backward(tile, weight, mean, variance)
        channels = tile.shape[1]
        mean, variance = _per_channel(mean, channels), _per_channel(variance, channels)
        return normalize(tile, weight, bias, mean, variance, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tile, weight, of_groups, variance = ctx.saved_tensors
        channels = tile.shape[1]
        mean, variance = _per_channel(of_groups, channels), _per_channel(variance, channels)
        grad_weight, grad_bias = gradient_sums(grad, tile, mean, variance, ctx.eps)
        needs_tile, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_tile = None
        if needs_tile:
            sums = torch.stack([grad_bias, grad_weight]).double()
            if mean is not of_groups:
                sums = sums * (1 if weight is None else weight)
                sums = sums.view(2, len(of_groups), -1).sum(2)
            totals = ctx.add_up(sums).div_(ctx.count)
            totals = _per_channel(totals.flatten(), 2 * channels).view(2, channels)
            if weight is not None and mean is of_groups:
                totals.mul_(weight)
            grad_tile = gradient_of_tile(grad, tile, weight, mean, variance, ctx.eps, totals)
        return (
            grad_tile,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            None,
            None,
            None,
        )


def _standardize(
    tile: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    moments: ChannelMoments,
    eps: float,
    comm: Communicator,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, differentiable.

    Args:
        tile: (N, C, ...).
        moments: over the tiles of all ranks of `comm`.
    """
    add_up = partial(sum_over_ranks, comm, name="norm backward")
    y: Tensor = Standardize.apply(tile, weight, bias, moments, eps, add_up)  # type: ignore[no-untyped-call]
    return y


def _per_channel(values: Tensor, channels: int) -> Tensor:
    """Values per group as values per channel."""
    size = len(values)
    return values if size == channels else values.repeat_interleave(channels // max(size, 1))


def normalize(
    tile: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` per channel in one pass."""
    if tile.numel() == 0:
        return torch.empty_like(tile)
    weight, bias = (None if value is None else value.to(mean.dtype) for value in (weight, bias))
    return torch.batch_norm(tile, weight, bias, mean, variance, False, 0.0, eps, False)


def gradient_sums(
    grad: Tensor, tile: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Sums of ``grad * (x - mean) / std`` and of ``grad`` over this tile, per channel."""
    if tile.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    none = constant(0.0, 0, mean.dtype, mean.device)
    ones = constant(1.0, len(mean), mean.dtype, mean.device)
    _, grad_weight, grad_bias = aten.native_batch_norm_backward(
        grad, tile, ones, mean, variance, none, none, False, eps, [False, True, True]
    )
    return grad_weight, grad_bias


def gradient_of_tile(
    grad: Tensor,
    tile: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    totals: Tensor,
) -> Tensor:
    """The gradient of the tile, statistics included (Ioffe and Szegedy 2015, section 3).

    Args:
        totals: (2, C), per channel the means of ``weight * grad`` over all pixels that share a
            statistic, and those of ``weight * grad * (x - mean) / std``.
    """
    if tile.numel() == 0:
        return torch.empty_like(tile)
    scale = (variance + eps).rsqrt_()
    # Two passes: -scale * (mean_projection * normalised x + mean_grad), then + scale * grad.
    by_mean, by_projection = totals.to(mean.dtype).mul(scale.neg()).unbind()
    result = torch.batch_norm(tile, by_projection, by_mean, mean, variance, False, 0.0, eps, False)
    if weight is not None:
        scale = scale * weight
    return result.addcmul_(grad, scale.to(grad.dtype).view(-1, *[1] * (tile.dim() - 2)))


def check_channels(name: str, x: SpatialTensor) -> None:
    """Refuse an image without an unsplit dim 1, the channels."""
    if x.dim() < 2 or 1 in split_dims(x):
        advice = "add the missing dim before the image is split"
        if x.dim() > 1 and x.spatial_dims.is_flat:
            advice = (
                "move it before the flattening, or gather the map: parallel.gather_before=NAME "
                "of this module, or spatialdl.gather_before(model, NAME)"
            )
        shape = image_shape(len(x.mesh.grid))
        raise UnsupportedSpatialOp(
            f"{name} on a split image takes {shape}, got {tuple(x.shape)}: {advice}"
        )


@register_op(F.batch_norm, split=("input",))
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
    check_channels("batch_norm", input)
    tile, mesh = to_tile(input), input.mesh
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError("batch_norm needs running statistics in evaluation")
        y = F.batch_norm(tile, running_mean, running_var, weight, bias, False, momentum, eps)
        return without_dims(input, y, ())
    replicas = StatisticsOver.comm
    count = None if replicas else input.numel() // input.shape[1]
    comm = replicas or mesh.grid_comm
    if comm.size == 1 and count != 1 and momentum is not None:  # PyTorch's kernel computes the same
        y = F.batch_norm(tile, running_mean, running_var, weight, bias, True, momentum, eps)
        return without_dims(input, y, ())
    y = train_batch_norm(tile, comm, count, running_mean, running_var, weight, bias, momentum, eps)
    return without_dims(input, y, ())


class StatisticsOver:
    """The ranks that share BatchNorm statistics in training, see `spatial.replicas`.

    Attributes:
        comm: these ranks; None for the grid of the image.
        parts: of an image.
    """

    comm: Communicator | None = None
    parts = 1


def train_batch_norm(
    tile: Tensor,
    comm: Communicator,
    count: int | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    copies: int = 1,
) -> Tensor:
    """A tile normalised by the statistics of the tiles of all ranks of `comm`.

    Args:
        count: see `global_moments`.
        copies: number of ranks with equal tiles, which count once.
    """
    if momentum is None:
        raise TypeError("batch_norm: momentum must be a number; only BatchNorm layers accept None")
    with torch.no_grad():
        moments = global_moments(tile, count, comm, "batch_norm")
        # The count is read only for single values, as reading it synchronises with the device.
        is_known = not (isinstance(moments.pixels, Tensor) and moments.pixels.is_meta)
        if tile.numel() <= tile.shape[1] and is_known and int(moments.pixels) == copies:
            raise ValueError(
                "batch_norm: expected more than 1 value per channel when training, got 1 with "
                f"{tile.shape[1]} channels"
            )
        moments = moments.of(tile)
        pixels = moments.pixels / copies if copies > 1 else moments.pixels
        once = moments._replace(pixels=pixels)
        update_running(once, running_mean, running_var, momentum)
    return _standardize(tile, weight, bias, moments, eps, comm)


def in_order_of_torch(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm of ``torch.nn.functional`` with the parameters that it has in ``torch``."""

    def torch_norm(
        input: SpatialTensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor:
        return norm(input, running_mean, running_var, weight, bias, training, momentum, eps)

    return torch_norm


register_op(torch.batch_norm, split=("input",))(in_order_of_torch(batch_norm))


def update_running(
    moments: ChannelMoments,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
) -> None:
    """Update running statistics by those of this batch, with the unbiased variance."""
    unbiased = moments.variance * (moments.pixels / (moments.pixels - 1))
    both = (running_mean, moments.mean), (running_var, unbiased)
    kept = [(one, value.to(one.dtype)) for one, value in both if one is not None]
    if kept:
        foreach_lerp_([one for one, _ in kept], [value for _, value in kept], momentum)


# --- GroupNorm and InstanceNorm


def _check(name: str, x: SpatialTensor) -> None:
    check_channels(name, x)
    if 0 in split_dims(x):
        raise refusal(name, [x], "its samples are merged with rows and columns")


def _normalize_groups(
    x: SpatialTensor,
    tile: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    name: str,
) -> tuple[Tensor, ChannelMoments]:
    """`tile` standardised over the groups of each sample, and their statistics."""
    samples, channels = tile.shape[:2]
    count, comm = x.numel() // max(x.shape[0] * groups, 1), x.mesh.grid_comm
    with torch.no_grad():
        moments = global_moments(as_channels(tile, samples * groups), count, comm, name)
    image = as_channels(tile, samples * channels)
    weight, bias = (None if one is None else one.repeat(samples) for one in (weight, bias))
    statistics = moments.of(tile)._replace(pixels=count)
    y = _standardize(image, weight, bias, statistics, eps, comm)
    return y.view(tile.shape), moments


def as_channels(tile: Tensor, channels: int) -> Tensor:
    """(N, C, ...) as (1, `channels`, rest); `channels` is N times a divisor of C."""
    return tile.reshape(1, channels, tile.numel() // max(channels, 1))


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
    tile = in_float32(to_tile(input))
    y, _ = _normalize_groups(input, tile, num_groups, weight, bias, eps, "group_norm")
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
    tile = to_tile(input)
    y, moments = _normalize_groups(input, tile, input.shape[1], weight, bias, eps, "instance_norm")
    if running_mean is not None or running_var is not None:
        update_running(_mean_over_samples(moments, input), running_mean, running_var, momentum)
    return without_dims(input, y, ())


def _mean_over_samples(moments: ChannelMoments, x: SpatialTensor) -> ChannelMoments:
    mean, variance = (v.view(x.shape[:2]).mean(0) for v in (moments.mean, moments.variance))
    return ChannelMoments(moments.pixels, mean, variance)


register_op(torch.instance_norm, split=("input",))(in_order_of_torch(instance_norm))


@register_op(F.local_response_norm, split=("input",))
def local_response_norm(
    input: SpatialTensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """Normalisation over neighbouring channels of a pixel; local."""
    _check("local_response_norm", input)
    y = F.local_response_norm(to_tile(input), size, alpha, beta, k)
    return without_dims(input, y, ())
