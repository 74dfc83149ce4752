"""GroupNorm on divided channels; without communication if each group lies on one rank.

Otherwise the statistics of groups are combined over the ranks as (count, mean, squared deviations):
messages have the size of the statistics, never of the maps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.channels.tensor import ChannelTensor, divided_op, on_tile, part_of
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.reduce import gather_over_ranks, sum_over_ranks
from spatialdl.parallel.partition import Partition
from spatialdl.spatial.autocast import in_float32, wide
from spatialdl.spatial.constants import on
from spatialdl.spatial.moments import tile_moments
from spatialdl.spatial.span import on_meta, split_dims
from spatialdl.spatial.tensor import SpatialTensor


@lru_cache(maxsize=1024)
def _groups_of(partition: Partition, rank: int, size: int) -> Tensor:
    """The group of each of a rank's channels, of groups of `size` channels: (own channels,)."""
    own = [torch.arange(start, stop) for start, stop in partition.held(rank)]
    return torch.cat(own) // size


@dataclass(frozen=True)
class _Groups:
    """The groups of a rank's channels.

    Attributes:
        of_own: the group of each own channel, (own channels,), on the device of the tile.
        number: number of all groups.
        count: number of elements of the whole tensor per group and sample.
        comms: the communicators over which statistics are combined, in order.
    """

    of_own: Tensor
    number: int
    count: int
    comms: tuple[Communicator, ...]

    def total(self, values: Tensor) -> Tensor:
        """Sums of values of own channels over each group, (..., groups)."""
        zeros = values.new_zeros(*values.shape[:-1], self.number)
        return zeros.index_add(-1, self.of_own, values)

    def spread(self, values: Tensor) -> Tensor:
        """Values of groups as values of own channels."""
        return values.index_select(-1, self.of_own)

    def moments(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and squared deviations of whole groups, (N, groups); float64."""
        parts = torch.stack(tile_moments(tile, _pixels(tile))).flatten(2)
        parts = _combined(parts, self.total, self.spread)
        for comm in self.comms:
            of_ranks = gather_over_ranks(comm, parts, "group_norm").transpose(0, 1)
            parts = _combined(of_ranks, lambda x: x.sum(0), lambda x: x)
        return parts[1], parts[2]

    def mean(self, parts: Tensor) -> Tensor:
        """The means over whole groups of sums per own channel, spread to these; (..., channels)."""
        total = self.total(parts.double())
        for comm in self.comms:
            total = sum_over_ranks(comm, total, "group_norm backward")
        return self.spread(total / self.count)


def _combined(
    parts: Tensor, total: Callable[[Tensor], Tensor], spread: Callable[[Tensor], Tensor]
) -> Tensor:
    """Count, mean and squared deviations of all parts, from those of each; zeros for no parts.

    Args:
        total: sums over parts.
        spread: broadcasts a total to the parts.
    """
    counts, means, deviations = parts
    count = total(counts)
    mean = total(counts * means) / count.clamp(min=1)
    deviation = total(deviations + counts * (means - spread(mean)).square())
    return torch.stack([count, mean, deviation])


def _pixels(tile: Tensor) -> tuple[int, ...]:
    return tuple(range(2, tile.dim()))


def _shaped(values: Tensor, tile: Tensor) -> Tensor:
    """Values per channel, (..., C), shaped to broadcast to the tile."""
    return values.view(*values.shape, *(1,) * (tile.dim() - 2))


class _Standardised(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps)`` of each group; saves the tile and its statistics."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, groups: _Groups, eps: float) -> Tensor:
        mean, deviation = groups.moments(tile)
        scale = (deviation / groups.count + eps).rsqrt()
        spread = (groups.spread(value).to(wide(tile).dtype) for value in (mean, scale))
        mean, scale = (_shaped(value, tile) for value in spread)
        ctx.save_for_backward(tile, mean, scale)
        ctx.groups = groups
        return ((tile - mean) * scale).to(tile.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tile, mean, scale = ctx.saved_tensors
        y = (tile - mean) * scale
        sums = torch.stack([part.sum(_pixels(tile)) for part in (wide(grad), grad * y)])
        of_grad, projection = (_shaped(v.to(y.dtype), tile) for v in ctx.groups.mean(sums))
        return (scale * (grad - of_grad - y * projection)).to(grad.dtype), None, None


def _is_whole_groups(partition: Partition, size: int) -> bool:
    """Whether every rank has at least one group, and only whole groups."""
    cuts = (bound for bounds in partition.pieces for bound in bounds)
    ranks = range(partition.ranks)
    return all(cut % size == 0 for cut in cuts) and all(map(partition.size_of, ranks))


def _is_map(tile: SpatialTensor) -> bool:
    """Whether samples and channels are not split, and there are no extra tokens."""
    return not tile.spatial_dims.beside and not {0, 1} & {*split_dims(tile)}


@divided_op(F.group_norm, torch.group_norm)
def group_norm(
    input: ChannelTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # torch.group_norm only
) -> Any:
    part, partition, comm = input.part, input.partition, input.comm
    if input.at != 1 or (isinstance(part, SpatialTensor) and not _is_map(part)):
        return NotImplemented
    on_meta(F.group_norm, input, num_groups)  # raises PyTorch's errors on all ranks
    size = input.shape[1] // num_groups
    own = [None if one is None else part_of(one, 0, partition, comm) for one in (weight, bias)]
    if _is_whole_groups(partition, size):
        held = partition.size_of(comm.rank) // size
        return input.like(F.group_norm(part, held, own[0], own[1], eps))
    of_own = on(_groups_of(partition, comm.rank, size), part.device)
    comms = (part.mesh.grid_comm, comm) if isinstance(part, SpatialTensor) else (comm,)
    count = input.numel() // max(input.shape[0] * num_groups, 1)
    groups = _Groups(of_own, num_groups, count, comms)

    def normalised(tile: Tensor) -> Tensor:
        if tile.dim() == 2:
            return normalised(tile.unsqueeze(2)).squeeze(2)
        y: Tensor = _Standardised.apply(in_float32(tile), groups, eps)  # type: ignore[no-untyped-call]
        factor, shift = (None if one is None else _shaped(one.to(y.dtype), y) for one in own)
        y = y if factor is None else y * factor
        return y if shift is None else y + shift

    return input.like(on_tile(normalised, part))
