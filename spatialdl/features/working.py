"""One worker of a run: takes slides, reads them ahead, encodes their tiles, writes their files."""

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
    """What all workers of a run have in common.

    Attributes:
        source: the slides.
        claims: which of them are taken.
        layout: of the folder of the run.
        about: attributes of the features.
        dtype: in which they are stored.
        precision: in which numbers the encoder computes.
        batch_size: tiles at a time.
        readers: threads that read.
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
    """What a worker did.

    Attributes:
        reports: of its slides.
        before: names of those that were done before.
        tiles: that were encoded.
        seconds: it took.
        waited: seconds that the encoder had nothing to do.
        encoding: seconds that it had.
        reading: seconds of all reading threads together.
    """

    reports: list[TilingReport] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    tiles: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    encoding: float = 0.0
    reading: float = 0.0


class FeatureWorker:
    """Does a share of a run.

    Args:
        job: the run.
        encoder: as made.
        device: where it computes.
        told: called with each report, and with the tiles encoded since the call before.
    """

    def __init__(
        self,
        job: FeatureJob,
        encoder: Encoder,
        device: torch.device,
        told: Callable[[TilingReport | None, int], None],
    ) -> None:
        self._job, self._told = job, told
        self._encoding = DeviceEncoder(encoder, device, job.precision, job.batch_size)
        self._outcome = WorkerResult()
        self._before: list[str] = []  # of the thread that opens slides

    def run(self) -> WorkerResult:
        """Take slides until there are none.

        Raises:
            ValueError: there is too little memory for a batch.
            OSError: nothing can be written.
        """
        started, outcome = time.monotonic(), self._outcome
        try:
            with ReadAhead(self._next, self._job.readers) as reading:
                self._go(reading)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a batch of {self._job.batch_size} tiles does not fit into the device's memory: "
                "lower --batch-size"
            ) from error
        outcome.seconds = time.monotonic() - started
        outcome.before, outcome.encoding = self._before, self._encoding.seconds
        return outcome

    def _go(self, reading: ReadAhead) -> None:
        encoding, stream = self._encoding, iter(reading)
        while True:
            asked = time.monotonic()
            one = next(stream, None)
            self._outcome.waited += time.monotonic() - asked
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
                raise  # nothing can be written, which other slides will not mend
            return failed(bag.report, error)
        except Exception as error:
            return failed(bag.report, error)

    def _report(self, report: TilingReport) -> None:
        self._outcome.reports.append(report)
        self._told(report, 0)

    def _count(self, tiles: int) -> None:
        self._outcome.tiles += tiles
        self._told(None, tiles)

    def _next(self) -> Opened | None:
        """The next slide, in a thread of its own."""
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
    """The report of a slide that cannot be used; of unforeseen errors the traceback is printed."""
    report.failed, report.written = True, 0
    if isinstance(error, SlideError | ShardError):
        report.note = str(error).replace(", or a column mpp of the labels", "")
    elif isinstance(error, OSError):
        report.note = f"slide {report.file}: {error.strerror or error}"
    else:
        traceback.print_exception(error, file=sys.stderr)
        report.note = f"slide {report.file}: {type(error).__name__}: {error}"
    return report
