"""An encoder on a whole region: split over ranks, or part after part in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.mesh import Mesh, init_mesh
from spatialdl.data.image_source import Box, ImageSource
from spatialdl.errors import SlideError, UnsupportedSpatialOp
from spatialdl.features.encoders.encoder import Encoder
from spatialdl.features.encoders.preprocessing import Preprocess
from spatialdl.features.maps.regions import SlideRegion
from spatialdl.parallel.layout import by
from spatialdl.pipeline.autocast import autocast
from spatialdl.predicting.pieces import MapPiece, own_pieces
from spatialdl.predicting.progress import ReadInBands
from spatialdl.spatial.dims import image_dims
from spatialdl.spatial.split import from_local
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.streaming.streamed import stream
from spatialdl.training.optimization.precision import Precision
from spatialdl.training.tasks.losses import own_pixels
from spatialdl.training.validation import Evaluated

Grid = tuple[int, int]


@dataclass(frozen=True)
class RegionParts:
    """Into which parts regions are cut.

    Attributes:
        grid: rows and columns of parts: one a rank, or in one process one after the other.
        limit_gb: 10^9 bytes of activations that one process has in memory; None for no limit.
    """

    grid: Grid
    limit_gb: float | None = None


def grid_for(ranks: int) -> Grid:
    """As square a grid as there is for so many ranks, with as many rows as columns or more."""
    columns = max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)
    return ranks // columns, columns


class MapNetwork:
    """An encoder for whole regions; all ranks make it and call it together.

    Args:
        encoder: of maps, as made, on the CPU.
        device: where this rank computes.
        precision: in which numbers.
        parts: into which regions are cut.
        world: the ranks.

    Raises:
        ValueError: the grid is of another number of ranks.
    """

    def __init__(
        self,
        encoder: Encoder,
        device: torch.device,
        precision: Precision,
        parts: RegionParts,
        world: Communicator,
    ) -> None:
        self._network = encoder.network.to(device, precision.dtype)
        self._preprocess = Preprocess(encoder.preprocessing, precision.dtype).to(device)
        self._device, self._precision, self._parts = device, precision, parts
        self._world = world
        self._mesh = init_mesh(parts.grid, comm=world) if world.size > 1 else None

    @torch.no_grad()
    def run(self, region: SlideRegion) -> tuple[tuple[int, int], list[MapPiece]]:
        """Rows and columns of the map of a region, and this rank's pieces of it.

        Raises:
            SlideError: the region is too small, or could not be read; on all ranks.
            ValueError: the encoder cannot be split, or there is too little memory.
        """
        if any(side < parts for side, parts in zip(region.size, self._parts.grid, strict=True)):
            raise SlideError(
                f"slide {region.images.path}: its region of {by(region.size)} is smaller than "
                f"--grid {','.join(map(str, self._parts.grid))}; take fewer parts"
            )
        try:
            with autocast(self._device, self._precision.mixed):
                size, pieces = self._run(region)
        except UnsupportedSpatialOp as error:
            raise ValueError(f"the encoder cannot be split: {error}") from error
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"slide {region.images.path}: a part of its region of {by(region.size)} does not "
                "fit into the device's memory: take more ranks, a coarser --mpp, or one process "
                "with --device cpu --grid ROWS,COLS --limit-gb X"
            ) from error
        unreadable = self._world.allgather(list(region.images.unreadable.values()))
        if problems := [why for one in unreadable for why in one]:
            raise SlideError(problems[0])
        return size, pieces

    def _run(self, region: SlideRegion) -> tuple[tuple[int, int], list[MapPiece]]:
        source: ImageSource = region.images
        if self._world.rank == 0 and (self._mesh is not None or self._parts.grid == (1, 1)):
            source = ReadInBands(source, region.name)  # shows how far it is
        if self._mesh is not None:
            tile = self._image(source, self._mesh.box(region.size))
            output = self._network(from_local(tile, self._mesh, region.size))
            return self._own(output, self._mesh)
        if self._parts.grid == (1, 1):
            output = self._network(self._image(source, (0, region.size[0], 0, region.size[1])))
        else:
            image = _Streamed(self, source, region.size)
            limit = self._parts.limit_gb
            output = stream(self._network, image, self._parts.grid, limit_gb=limit)
        return _size(output), [MapPiece((0, 0), self._plain(output)[0].cpu())]

    def _own(self, output: Tensor, mesh: Mesh) -> tuple[tuple[int, int], list[MapPiece]]:
        """A map that lies on the ranks of a mesh."""
        if isinstance(output, SpatialTensor):
            split = output.spatial_layout.size == tuple(output.shape[2:])
            if not split or output.spatial_dims != image_dims(2):
                output = output.full_tensor()
        local = self._plain(own_pixels(output))
        return _size(output), own_pieces(local, Evaluated(range(1), output, output, mesh))

    def _plain(self, output: Tensor) -> Tensor:
        return output.float() if self._precision.mixed else output

    def _image(self, source: ImageSource, box: Box) -> Tensor:
        """A box of a region as the encoder takes it, (1, 3, rows, columns)."""
        pixels = torch.from_numpy(np.require(source.read(0, box), requirements="W"))
        return self._preprocess.scaled(pixels.to(self._device)[None])


class _Streamed:
    """A region as an array of which `stream` reads parts."""

    def __init__(self, network: MapNetwork, source: ImageSource, size: tuple[int, int]) -> None:
        self._network, self._source = network, source
        self.shape = (1, 3, *size)

    def __getitem__(self, part: tuple[Any, ...]) -> Tensor:
        *_, rows, columns = part
        box = (rows.start, rows.stop, columns.start, columns.stop)
        return self._network._image(self._source, box)


def _size(output: Tensor) -> tuple[int, int]:
    rows, columns = output.shape[2:]
    return int(rows), int(columns)
