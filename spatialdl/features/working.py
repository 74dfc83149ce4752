"""Feature worker: claims slides, reads ahead, encodes tiles, writes files."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spatialdl.errors import ShardError, SlideError
from spatialdl.features.claims import Claims
from spatialdl.features.encoders.encoder import Encoder
from spatialdl.features.encoding import DeviceEncoder, Filling
from spatialdl.features.reading import Opened, ReadAhead
from spatialdl.features.results import ResultFolders, check_other, load_before, save_slide
from spatialdl.features.sources import SlideTiles, TileSource
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.steps import Task
from spatialdl.training.optimization.precision import Precision


@dataclass(frozen=True)
class FeatureJob:
    """Settings shared by all workers of a run.

    Attributes:
        source: the slides.
        claims: claims of workers on slides.
        layout: folders of the run.
        about: attributes of the features.
        dtype: dtype of the stored features.
        precision: precision of the encoder.
        batch_size: tiles per batch.
        readers: number of reading threads.
    """

    source: TileSource
    claims: Claims
    layout: ResultFolders
    about: dict[str, object]
    dtype: str
    precision: Precision
    batch_size: int
    readers: int


@dataclass
class WorkerResult:
    """The results of a worker.

    Attributes:
        reports: reports of its slides.
        before: names of slides completed by an earlier run.
        tiles: number of encoded tiles.
        seconds: total time.
        waited: seconds the encoder waited for tiles.
        encoding: seconds the encoder was busy.
        reading: seconds of reading, summed over threads.
    """

    reports: list[TilingReport] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    tiles: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    encoding: float = 0.0
    reading: float = 0.0


class FeatureWorker:
    """A worker that computes features of slides.

    Args:
        job: the run.
        encoder: the encoder, on the CPU.
        device: device of the encoder.
        progress: called with each report, and with the number of tiles since the last call.
    """

    def __init__(
        self,
        job: FeatureJob,
        encoder: Encoder,
        device: torch.device,
        progress: Callable[[TilingReport | None, int], None],
    ) -> None:
        self._job, self._progress = job, progress
        self._encoding = DeviceEncoder(encoder, device, job.precision, job.batch_size)
        self._outcome = WorkerResult()
        self._before: list[str] = []  # written by the thread that opens slides

    def run(self) -> WorkerResult:
        """Process slides until none is left.

        Raises:
            ValueError: the device runs out of memory.
            OSError: the output cannot be written.
        """
        started, outcome = time.monotonic(), self._outcome
        try:
            with ReadAhead(self._next, self._job.readers) as reading:
                self._process(reading)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a batch of {self._job.batch_size} tiles does not fit into the device's memory: "
                "lower --batch-size"
            ) from error
        outcome.seconds = time.monotonic() - started
        outcome.before, outcome.encoding = self._before, self._encoding.seconds
        return outcome

    def _process(self, reading: ReadAhead) -> None:
        encoding, stream = self._encoding, iter(reading)
        while True:
            started = time.monotonic()
            one = next(stream, None)
            self._outcome.waited += time.monotonic() - started
            if one is None:
                break
            if isinstance(one, TilingReport):
                self._report(one)
            elif one.problem is not None:
                encoding.fail(one.bag, one.problem)
            elif one.piece is not None:
                self._outcome.reading += one.piece.part.seconds
                self._count(len(one.piece.tiles))
                self._save_all(encoding.add(one.bag, one.piece))
            else:
                self._save_all(encoding.end(one.bag))
        self._save_all(encoding.flush())

    def _save_all(self, fillings: Any) -> None:
        for filling in fillings:
            self._report(self._saved(filling))
            filling.bag.close()

    def _saved(self, filling: Filling) -> TilingReport:
        job, bag = self._job, filling.bag
        try:
            if filling.problem is not None:
                raise filling.problem
            return save_slide(job.layout, filling, np.dtype(job.dtype), job.about)
        except OSError as error:
            if filling.problem is None:
                raise  # writing would fail for the next slides as well
            return failed(bag.report, error)
        except Exception as error:
            return failed(bag.report, error)

    def _report(self, report: TilingReport) -> None:
        self._outcome.reports.append(report)
        self._progress(report, 0)

    def _count(self, tiles: int) -> None:
        self._outcome.tiles += tiles
        self._progress(None, tiles)

    def _next(self) -> Opened | None:
        """Open the next slide; called in the planning thread."""
        number = self._job.claims.take()
        if number is None:
            return None
        task = self._job.source.tasks[number]
        try:
            return self._opened(task)
        except Exception as error:
            return failed(TilingReport(task.name, file=str(task.path)), error)

    def _opened(self, task: Task) -> SlideTiles | TilingReport:
        job = self._job
        key = job.source.key(task)
        before = load_before(job.layout, task.name)
        if before is not None and before.key == key and not before.report.failed:
            self._before.append(task.name)
            return before.report
        check_other(before, key, job.layout.out, str(task.path))
        return job.source.open(task, key)


def failed(report: TilingReport, error: Exception) -> TilingReport:
    """The report of a failed slide; prints the traceback of unexpected errors."""
    report.failed, report.written = True, 0
    if isinstance(error, SlideError | ShardError):
        report.note = str(error).replace(", or a column mpp of the labels", "")
    elif isinstance(error, OSError):
        report.note = f"slide {report.file}: {error.strerror or error}"
    else:
        traceback.print_exception(error, file=sys.stderr)
        report.note = f"slide {report.file}: {type(error).__name__}: {error}"
    return report
