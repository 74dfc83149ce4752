"""Worker of `--whole`: slide after slide, each region on all ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.mesh import Mesh, init_mesh
from spatialdl.common.text import progress_bar
from spatialdl.data.image_source import Box, ImageSource
from spatialdl.errors import SlideError, UnsupportedSpatialOp
from spatialdl.inference.features.encoders.encoder import Encoder, Preprocess
from spatialdl.inference.features.maps.regions import RegionSource, SlideRegion, Stride
from spatialdl.inference.features.maps.writing import FoundMap, save_map
from spatialdl.inference.features.results import FeatureRun, resume_attributes
from spatialdl.inference.features.workers import FeatureWork, WorkerResult
from spatialdl.inference.predicting.loop import Team, process
from spatialdl.inference.predicting.pieces import MapPiece, own_pieces
from spatialdl.inference.predicting.running import ReadInBands
from spatialdl.layout.layout import by
from spatialdl.pipeline.autocast import autocast
from spatialdl.pipeline.streamed import stream
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.steps import Task
from spatialdl.spatial.dims import image_dims
from spatialdl.spatial.split import from_local
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.training.optimization.precision import Precision
from spatialdl.training.tasks.losses import own_pixels
from spatialdl.training.validation import Evaluated


class Opened(NamedTuple):
    """A slide whose map is to be computed; without a region if it has no tissue."""

    report: TilingReport
    key: str
    region: SlideRegion | None


class MapWork(FeatureWork):
    """Maps of regions; construction is collective.

    Args:
        stride: stride of the encoder's maps.
        network: the encoder.
        world: the ranks.
    """

    def __init__(
        self, run: FeatureRun, stride: Stride, network: MapNetwork, world: Communicator
    ) -> None:
        super().__init__(run)
        self._stride, self._network, self._world = stride, network, world

    def open(self, task: Task) -> Opened:
        """Open a slide: report, key, and region unless it has no tissue."""
        source = self._run.source
        assert isinstance(source, RegionSource)
        report, region = source.region(task, self._stride)
        if region is None:  # remove files of an earlier version of the slide
            for path in self._run.layout.files_of(task.name):
                path.unlink(missing_ok=True)
        return Opened(report, self._key, region)

    def run(self, task: Task, opened: Opened) -> TilingReport:
        """Compute and write the map of a slide.

        Raises:
            SlideError: the region cannot be computed.
            ValueError: the encoder cannot be split, or the device runs out of memory.
            OSError: the output cannot be written.
        """
        report, key, region = opened
        if region is None:
            return report
        run, started = self._run, time.monotonic()
        try:
            size, pieces = self._network.run(region)
            found = FoundMap(region, size, run.width, pieces).stored(run.options.dtype, self._world)
        finally:
            region.images.close()
        report.written, report.seconds = 1, report.seconds + time.monotonic() - started
        attributes = {
            **run.about,
            **region.attributes(self._stride, size),
            **resume_attributes(key, report),
        }
        save_map(run.layout, found, attributes, run.options.slide_mpp, self._world)
        return report


def save_maps(
    run: FeatureRun,
    encoder: Encoder,
    device: torch.device,
    precision: Precision,
    stride: Stride,
    parts: RegionParts,
    world: Communicator,
) -> WorkerResult:
    """Write the maps of all slides; collective.

    Args:
        encoder: an encoder of maps, on the CPU.
        device: device of this rank.
        stride: stride of the encoder's maps.
        parts: parts into which regions are split.

    Returns:
        The result with the reports of all slides, on rank 0.
    """
    network = MapNetwork(encoder, device, precision, parts, world)
    work, tasks = MapWork(run, stride, network, world), run.source.tasks
    slides = process(tasks, Team(world), world, work)
    bar = progress_bar(slides, None, "slide", shows=world.rank == 0, total=len(tasks))
    work.outcome.reports = list(bar)
    return work.outcome


# --- an encoder on a whole region: split over ranks, or part by part in a single process


Grid = tuple[int, int]


@dataclass(frozen=True)
class RegionParts:
    """The parts into which regions are split.

    Attributes:
        grid: rows and columns of parts: one per rank, or processed in turn by a single process.
        limit_gb: 10^9 bytes of activations in memory of a single process; None for no limit.
    """

    grid: Grid
    limit_gb: float | None = None


def grid_for(ranks: int) -> Grid:
    """The grid of `ranks` parts that is closest to square, with at least as many rows."""
    columns = max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)
    return ranks // columns, columns


class MapNetwork:
    """An encoder for whole regions; construction and calls are collective.

    Args:
        encoder: an encoder of maps, on the CPU.
        device: device of this rank.
        precision: precision of the computation.
        parts: parts into which regions are split.
        world: the ranks.

    Raises:
        ValueError: the grid does not match the number of ranks.
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
        """Compute the map of a region: its rows and columns, and this rank's pieces.

        Raises:
            SlideError: the region is too small or unreadable; on all ranks.
            ValueError: the encoder cannot be split, or the device runs out of memory.
        """
        if any(side < parts for side, parts in zip(region.size, self._parts.grid, strict=True)):
            raise SlideError(
                f"slide {region.images.path}: its region of {by(region.size)} is smaller than "
                f"--grid {','.join(map(str, self._parts.grid))}; use fewer parts"
            )
        try:
            with autocast(self._device, self._precision.mixed):
                size, pieces = self._run(region)
        except UnsupportedSpatialOp as error:
            raise ValueError(f"the encoder cannot be split: {error}") from error
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"slide {region.images.path}: a part of its region of {by(region.size)} does not "
                "fit into the device's memory: use more ranks, a coarser --mpp, or a single "
                "process with --device cpu --grid ROWS,COLS --limit-gb X"
            ) from error
        unreadable = self._world.allgather(list(region.images.unreadable.values()))
        if problems := [why for one in unreadable for why in one]:
            raise SlideError(problems[0])
        return size, pieces

    def _run(self, region: SlideRegion) -> tuple[tuple[int, int], list[MapPiece]]:
        source: ImageSource = region.images
        if self._world.rank == 0 and (self._mesh is not None or self._parts.grid == (1, 1)):
            source = ReadInBands(source, region.name)  # shows a progress bar
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
        """Size and own pieces of a map distributed over a mesh."""
        if isinstance(output, SpatialTensor):
            split = output.spatial_layout.size == tuple(output.shape[2:])
            if not split or output.spatial_dims != image_dims(2):
                output = output.full_tensor()
        local = self._plain(own_pixels(output))
        return _size(output), own_pieces(local, Evaluated(range(1), output, output, mesh))

    def _plain(self, output: Tensor) -> Tensor:
        return output.float() if self._precision.mixed else output

    def _image(self, source: ImageSource, box: Box) -> Tensor:
        """Read a box of a region as input of the encoder, (1, 3, rows, columns)."""
        pixels = torch.from_numpy(np.require(source.read(0, box), requirements="W"))
        return self._preprocess.scaled(pixels.to(self._device)[None])


class _Streamed:
    """A region as an array, of which `stream` reads parts."""

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
