"""Features of tiles: slide after slide, read ahead by threads, encoded in batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import current_device
from spatialdl.comm.single_process import SingleProcess
from spatialdl.common.text import counted, progress_bar
from spatialdl.data.outcomes import failure_reason
from spatialdl.inference.features.encoders.encoder import Encoder, Preprocess
from spatialdl.inference.features.results import FeatureRun, resume, save_slide
from spatialdl.inference.features.sources import SlideTiles, TilePiece, Tiles
from spatialdl.inference.predicting.loop import Team, process
from spatialdl.pipeline.autocast import autocast
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.steps import Task
from spatialdl.training.optimization.precision import Precision


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


class FeatureWork:
    """What works on tiles and on regions have in common; see `loop.Work`.

    Attributes:
        outcome: results of this rank.
    """

    def __init__(self, run: FeatureRun) -> None:
        self._run, self._key, self.outcome = run, "", WorkerResult()

    def known(self, task: Task) -> TilingReport | None:
        self._key = self._run.source.key(task)
        before = resume(self._run.layout, task, self._key)
        self.outcome.before += [] if before is None else [task.name]
        return before

    def failed(self, task: Task, opened: Any, error: Exception) -> TilingReport:
        fresh = TilingReport(task.name, file=str(task.path))
        return failed(fresh if opened is None else opened.report, error)


class TileWork(FeatureWork):
    """Features of the tiles of slides, on this rank.

    Decoders and resampling release the GIL, so threads suffice for reading.

    Args:
        encoder: the encoder, on the CPU.
        device: device of the encoder.
        precision: precision of the encoder.
        pool: threads that read.
    """

    def __init__(
        self,
        run: FeatureRun,
        encoder: Encoder,
        device: torch.device,
        precision: Precision,
        pool: ThreadPoolExecutor,
    ) -> None:
        super().__init__(run)
        self._pool = pool
        self._network = encoder.network.to(device, precision.dtype)
        self._preprocess = Preprocess(encoder.preprocessing, precision.dtype).to(device)
        self._device, self._precision = device, precision

    def open(self, task: Task) -> SlideTiles:
        return self._run.source.open(task, self._key)

    def run(self, task: Task, tiles: SlideTiles) -> TilingReport:
        """Read, encode and write the tiles of a slide.

        Raises:
            SlideError: features are not finite.
            ValueError: the device runs out of memory.
            OSError: the output cannot be written.
        """
        parts, features, outcome = [], list[npt.NDArray[np.generic]](), self.outcome
        size, waiting = self._run.options.batch_size, np.empty((0, tiles.side, tiles.side, 3), "u1")
        pieces = self._read(tiles)
        try:
            while True:
                started = time.monotonic()
                try:
                    piece = next(pieces, None)
                except Exception as error:  # decoders may raise anything for damaged files
                    return failed(tiles.report, error)
                outcome.waited += time.monotonic() - started
                if piece is None:
                    break
                parts.append(piece.part)
                outcome.reading += piece.part.seconds
                outcome.tiles += len(piece.tiles)
                waiting = np.concatenate([waiting, piece.tiles])
                while len(waiting) >= size:
                    features.append(self._encoded(waiting[:size]))
                    waiting = waiting[size:]
            features += [self._encoded(waiting)] if len(waiting) else []
            return save_slide(self._run, tiles, parts, features)
        finally:
            pieces.close()
            tiles.close()

    def _read(self, tiles: SlideTiles) -> Generator[TilePiece, None, None]:
        """Pieces in order, read ahead by all threads."""
        ahead = deque[Future[TilePiece]]()
        try:
            for first, last in tiles.pieces():
                ahead.append(self._pool.submit(tiles.read, first, last))
                if len(ahead) > 2 * self._run.options.readers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for one in ahead:  # files are open until running reads end
                if not one.cancel():
                    one.exception()

    def _encoded(self, tiles: Tiles) -> npt.NDArray[np.generic]:
        started, host = time.monotonic(), torch.from_numpy(np.ascontiguousarray(tiles))
        if self._device.type != "cpu":
            host = host.pin_memory()
        try:
            with torch.inference_mode(), autocast(self._device, self._precision.mixed):
                images = self._preprocess(host.to(self._device, non_blocking=True))
                found = self._network(images).to(self._precision.dtype).cpu()
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a batch of {counted(len(tiles), 'tile')} does not fit into the device's memory: "
                "lower --batch-size"
            ) from error
        self.outcome.encoding += time.monotonic() - started
        features: npt.NDArray[np.generic] = found.numpy()
        return features


def save_features(
    run: FeatureRun,
    encoder: Encoder,
    device: torch.device,
    precision: Precision,
    world: Communicator,
) -> WorkerResult:
    """Write the features of this rank's slides, every `world.size`-th, the largest first.

    Args:
        encoder: the encoder, on the CPU.
        device: device of the encoder.

    Raises:
        ValueError: the device runs out of memory.
        OSError: the output cannot be written.
    """
    started, own, alone = (
        time.monotonic(),
        run.source.tasks[world.rank :: world.size],
        SingleProcess(),
    )
    with ThreadPoolExecutor(run.options.readers, "reading") as pool:
        work = TileWork(run, encoder, device, precision, pool)
        slides = process(own, Team(alone), alone, work)
        bar = progress_bar(slides, None, "slide", shows=world.rank == 0, total=len(own))
        work.outcome.reports = list(bar)
    work.outcome.seconds = time.monotonic() - started
    return work.outcome


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
