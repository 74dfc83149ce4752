"""Worker of `--whole`: slide after slide, each region on all ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spatialdl.comm.communicator import Communicator
from spatialdl.common.text import progress_bar
from spatialdl.errors import SlideError
from spatialdl.inference.features.encoders.encoder import Encoder
from spatialdl.inference.features.maps.network import MapNetwork, RegionParts
from spatialdl.inference.features.maps.regions import RegionSource, SlideRegion, Stride
from spatialdl.inference.features.maps.writing import FoundMap, save_map
from spatialdl.inference.features.results import ResultFolders, resume, resume_attributes
from spatialdl.inference.features.workers import WorkerResult, failed
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.steps import Task
from spatialdl.training.optimization.precision import Precision


@dataclass(frozen=True)
class MapJob:
    """Settings shared by all ranks of a run.

    Attributes:
        source: the slides.
        layout: folders of the run.
        about: attributes of the features.
        dtype: dtype of the stored features.
        precision: precision of the encoder.
        stride: stride of the encoder's maps.
        width: features per cell.
        parts: parts into which regions are split.
    """

    source: RegionSource
    layout: ResultFolders
    about: Mapping[str, Any]
    dtype: str
    precision: Precision
    stride: Stride
    width: int
    parts: RegionParts


class MapWorker:
    """Worker that writes maps of regions; construction and calls are collective.

    Args:
        job: the run.
        encoder: an encoder of maps, on the CPU.
        device: device of this rank.
        world: the ranks.

    Raises:
        ValueError: the grid does not match the number of ranks.
    """

    def __init__(
        self, job: MapJob, encoder: Encoder, device: torch.device, world: Communicator
    ) -> None:
        self._job, self._world = job, world
        self._network = MapNetwork(encoder, device, job.precision, job.parts, world)
        self._outcome = WorkerResult()

    def run(self) -> WorkerResult:
        """Write the maps of all slides.

        Returns:
            The result with the reports of all slides, on rank 0.

        Raises:
            ValueError: the encoder cannot be split, or the device runs out of memory.
            OSError: the output cannot be written.
        """
        tasks, first = self._job.source.tasks, self._world.rank == 0
        with progress_bar(None, None, "slide", shows=first, total=len(tasks)) as bar:
            for task in tasks:
                report = self._one(task)
                if first:
                    self._outcome.reports.append(report)
                bar.update()
        return self._outcome

    def _one(self, task: Task) -> TilingReport:
        opened = self._opened(task) if self._world.rank == 0 else None
        agreed: tuple[TilingReport, str, SlideRegion | None] = self._world.bcast(opened)
        report, key, region = agreed
        if region is None:
            return report
        job, started = self._job, time.monotonic()
        try:
            size, pieces = self._network.run(region)
            found = FoundMap(region, size, job.width, pieces).stored(job.dtype, self._world)
        except SlideError as error:  # the same on all ranks
            return failed(report, error)
        finally:
            region.images.close()
        report.written, report.seconds = 1, report.seconds + time.monotonic() - started
        attributes = {
            **job.about,
            **region.attributes(job.stride, size),
            **resume_attributes(key, report),
        }
        save_map(job.layout, found, attributes, job.source.options.slide_mpp, self._world)
        return report

    def _opened(self, task: Task) -> tuple[TilingReport, str, SlideRegion | None]:
        """Open a slide on rank 0: report, key, and region if it is still to be computed."""
        job = self._job
        try:
            key = job.source.key(task)
            before = resume(job.layout, task, key)
            if before is not None:
                self._outcome.before.append(task.name)
                return before, key, None
            report, region = job.source.region(task, job.stride)
            if region is None:  # remove files of an earlier version of the slide
                for path in job.layout.files_of(task.name):
                    path.unlink(missing_ok=True)
            return report, key, region
        except Exception as error:
            return failed(TilingReport(task.name, file=str(task.path)), error), "", None
