"""The largest tile of a grid, with which a network is run without data."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from spatialdl.channels.tensor import ChannelTensor
from spatialdl.comm.mesh import Mesh, dry_mesh
from spatialdl.parallel.layout import Layout, finer_grid, finer_parts
from spatialdl.spatial.tensor import SpatialTensor


def largest_part(layout: Layout, among: Iterable[int] | None = None) -> int:
    """The part with the most pixels, and among those with the most neighbours.

    Args:
        among: candidate parts; None for all.
    """

    def size(part: int) -> tuple[int, int]:
        places = zip(layout.part_at(part), layout.grid, strict=True)
        neighbours = sum((place > 0) + (place < parts - 1) for place, parts in places)
        return math.prod(layout.boxes[part].shape[1:]), neighbours

    return max(range(len(layout.boxes)) if among is None else among, key=size)


class LargestTile:
    """The rank with the largest part of images of a shape (N, C, *spatial).

    Args:
        grid: of ranks.
        stream: virtual tiles of a rank along each spatial dim; () for none.

    Attributes:
        mesh: of all tiles, including virtual ones.
        rank: the rank with the largest part.
        tiles: number of virtual tiles of this rank.
    """

    def __init__(
        self, shape: tuple[int, ...], grid: tuple[int, ...], stream: tuple[int, ...] = ()
    ) -> None:
        self._shape, self._stream = shape, stream
        self.rank = largest_part(Layout.of_ranks(shape[0], shape[2:], grid, stream))
        self.tiles = math.prod(stream)
        if not stream:
            self.mesh: Mesh = dry_mesh(grid, self.rank)
            return
        processes = [finer_parts(grid, stream, part) for part in range(math.prod(grid))]
        fine = finer_grid(grid, stream)
        layout = Layout.even(shape[0], shape[2:], fine)
        self.mesh = dry_mesh(fine, largest_part(layout, processes[self.rank]), processes)

    def image(self, dtype: torch.dtype) -> Tensor:
        """The tile of the images, without data."""
        if self.mesh.parts == 1:
            return torch.empty(self._shape, dtype=dtype, device="meta")
        layout = self.mesh.layout(self._shape[0], self._shape[2:])
        shape = (*self._shape[:2], *self.mesh.own_box(layout).shape[1:])
        return SpatialTensor(torch.empty(shape, dtype=dtype, device="meta"), layout, self.mesh)

    def bytes(self, tensor: Tensor) -> int:
        """Bytes of a tensor on all virtual tiles of the rank; counted once if it is not split."""
        size = local(tensor).nbytes
        if not self._stream or not isinstance(tensor, SpatialTensor):
            return size
        layout = tensor.spatial_layout
        own = math.prod(self.mesh.own_box(layout).shape[1:])
        rank = math.prod(layout.coarser(self._stream).boxes[self.rank].shape[1:])
        return size * rank // own if own else size * self.tiles


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    part = tensor.part if isinstance(tensor, ChannelTensor) else tensor
    return part._tile if isinstance(part, SpatialTensor) else part
