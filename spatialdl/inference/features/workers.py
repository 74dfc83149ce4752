"""Workers of a run: each claims slides, reads ahead, encodes tiles, writes files."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from spatialdl.comm.device_path import current_device
from spatialdl.common.text import counted, progress_bar
from spatialdl.data.outcomes import failure_reason
from spatialdl.inference.features.encoders.encoder import Encoder
from spatialdl.inference.features.encoding import DeviceEncoder, Filling, Opened, ReadAhead
from spatialdl.inference.features.results import ResultFolders, resume, save_slide
from spatialdl.inference.features.sources import TileSource
from spatialdl.slides.batch.report import TilingReport
from spatialdl.training.optimization.precision import Precision

_PREFIX = ".claims-"


class Claims:
    """The claims of a run on its slides; cheap to pickle.

    An idle worker claims the next slide, largest first, by creating a folder, which succeeds for
    exactly one worker, also on shared file systems. No worker waits for another, and there is no
    coordinator.

    Args:
        folder: folder created by `new_claims`.
        count: number of slides.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count, self._next = folder, count, 0

    def take(self) -> int | None:
        """Claim a slide and return its number; None if no slide is left."""
        while self._next < self._count:
            number, self._next = self._next, self._next + 1
            try:
                (self._folder / str(number)).mkdir()
            except FileExistsError:
                continue
            return number
        return None

    def taken(self) -> int:
        """Number of slides claimed by all workers."""
        return len(list(self._folder.iterdir()))

    def remove(self) -> None:
        """Remove the folder, after all workers have finished."""
        shutil.rmtree(self._folder, ignore_errors=True)


def new_claims(out: Path, count: int) -> Claims:
    """Create the claims of a new run, and remove those of killed runs."""
    for left in out.glob(f"{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    return Claims(Path(mkdtemp(prefix=_PREFIX, dir=out)), count)


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
        shows: whether to show a progress bar of the slides of all workers.
    """

    def __init__(
        self, job: FeatureJob, encoder: Encoder, device: torch.device, *, shows: bool
    ) -> None:
        self._job = job
        self._encoding = DeviceEncoder(encoder, device, job.precision, job.batch_size)
        self._outcome = WorkerResult()
        self._bar = progress_bar(
            None,
            None,
            "slide",
            shows=shows,
            total=len(job.source.tasks),
            dynamic_ncols=True,
            miniters=0,
        )

    def run(self) -> WorkerResult:
        """Process slides until none is left.

        Raises:
            ValueError: the device runs out of memory.
            OSError: the output cannot be written.
        """
        started, outcome = time.monotonic(), self._outcome
        try:
            with self._bar, ReadAhead(self._next, self._job.readers) as reading:
                self._process(reading)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a batch of {self._job.batch_size} tiles does not fit into the device's memory: "
                "lower --batch-size"
            ) from error
        outcome.seconds = time.monotonic() - started
        outcome.encoding = self._encoding.seconds
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
                self._outcome.tiles += len(one.piece.tiles)
                self._show(0)
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
        if not self._bar.disable:
            self._show(max(0, self._job.claims.taken() - self._bar.n))

    def _show(self, slides: int) -> None:
        self._bar.set_postfix_str(counted(self._outcome.tiles, "tile"), refresh=False)
        self._bar.update(slides)

    def _next(self) -> Opened | None:
        """Open the next slide; called by a reading thread."""
        number = self._job.claims.take()
        if number is None:
            return None
        task = self._job.source.tasks[number]
        try:
            key = self._job.source.key(task)
            before = resume(self._job.layout, task, key)
            if before is None:
                return self._job.source.open(task, key)
            self._outcome.before.append(task.name)
            return before
        except Exception as error:
            return failed(TilingReport(task.name, file=str(task.path)), error)


def failed(report: TilingReport, error: Exception) -> TilingReport:
    """The report of a failed slide; prints the traceback of unexpected errors."""
    report.failed, report.written = True, 0
    reason = failure_reason(f"slide {report.file}", error)
    report.note = reason.replace(", or a column mpp of the labels", "")
    return report


def device_for(name: str, number: int) -> torch.device:
    """The device of a worker, round-robin over the devices of a machine.

    Args:
        name: value of `--device`.
        number: index of the worker on its machine.

    Raises:
        ValueError: the device is not available.
    """
    if name == "cpu":
        return torch.device("cpu")
    found = current_device()
    if name not in ("auto", found.type):
        raise ValueError(f"--device {name}: PyTorch sees no {name} here; use cpu or auto")
    if found.type == "cpu":
        return found
    device = torch.device(found.type, number % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def check_same(encoder: Encoder, digest: str) -> None:
    """Check that an encoder has the same weights as the first worker's.

    Raises:
        ValueError: they differ.
    """
    if encoder.digest() != digest:
        raise ValueError(
            "the encoder's weights differ between processes: give --weights FILE, or load them in "
            "its class"
        )
