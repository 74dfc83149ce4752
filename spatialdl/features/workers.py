"""Workers of a run: this process, or processes of this machine; devices are taken in turn."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from queue import Empty
from typing import Any

import torch
from tqdm import tqdm

from spatialdl.comm.device_path import current_device
from spatialdl.comm.launch import end_with_launcher
from spatialdl.features.encoders.encoder import Encoder, Wish
from spatialdl.features.encoders.making import make_encoder
from spatialdl.features.working import FeatureJob, FeatureWorker, WorkerResult
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.sharing import DIED
from spatialdl.text import counted

_LOOK_S = 0.5  # after which the parent looks whether its processes live


class SlideProgress:
    """A bar of slides, with the tiles so far.

    Args:
        slides: of the run.
        job: where several workers are at it and only this one is heard of; it counts slides that
            were taken by all.
    """

    def __init__(self, slides: int, job: FeatureJob | None = None) -> None:
        self._bar = tqdm(
            total=slides, unit="slide", disable=None, leave=False, dynamic_ncols=True, miniters=0
        )
        self._tiles, self._job = 0, job

    def told(self, report: TilingReport | None, tiles: int) -> None:
        """Take note of what `FeatureWorker` tells."""
        self._tiles += tiles
        if self._bar.disable:
            return
        self._bar.set_postfix_str(counted(self._tiles, "tile"), refresh=False)
        done = 0 if report is None else 1
        if self._job is not None and report is not None:
            done = max(0, self._job.claims.taken() - self._bar.n)
        self._bar.update(done)

    def close(self) -> None:
        """Remove it."""
        self._bar.close()


def device_for(name: str, number: int) -> torch.device:
    """The device of a worker: devices of a machine are taken in turn.

    Args:
        name: `--device`.
        number: of the worker on its machine.

    Raises:
        ValueError: there is no such device.
    """
    if name == "cpu":
        return torch.device("cpu")
    found = current_device()
    if name not in ("auto", found.type):
        raise ValueError(f"--device {name}: PyTorch sees no {name} here; take cpu or auto")
    if found.type == "cpu":
        return found
    device = torch.device(found.type, number % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def run_alone(job: FeatureJob, encoder: Encoder, device: torch.device) -> list[WorkerResult]:
    """Do all of it in this process."""
    progress = SlideProgress(len(job.source.tasks))
    try:
        return [FeatureWorker(job, encoder, device, progress.told).run()]
    finally:
        progress.close()


def run_processes(
    job: FeatureJob, wish: Wish, digest: str, device: str, count: int
) -> list[WorkerResult]:
    """Share it among processes; slides of one that dies are reported as failed.

    Args:
        wish: by which each makes its encoder.
        digest: of its weights, which all must have.
        device: `--device`.
        count: processes.

    Raises:
        ValueError, OSError: a process cannot work.
    """
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    processes = [
        context.Process(
            target=_in_process, args=(job, wish, digest, device, number, count, queue), daemon=True
        )
        for number in range(count)
    ]
    progress = SlideProgress(len(job.source.tasks))
    try:
        for process in processes:
            process.start()
        return _collected(processes, queue, job, progress)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        progress.close()


def _collected(
    processes: Sequence[Any], queue: Any, job: FeatureJob, progress: SlideProgress
) -> list[WorkerResult]:
    outcomes: dict[int, WorkerResult] = {}
    reports: list[TilingReport] = []
    dead = False
    while len(outcomes) < len(processes):
        try:
            number, kind, value = queue.get(timeout=_LOOK_S)
        except Empty:
            alive = [process.is_alive() for process in processes]
            if dead:  # and nothing of it is on its way any more
                for number, lives in enumerate(alive):
                    if not lives:
                        outcomes.setdefault(number, WorkerResult())
            dead = not all(alive)
            continue
        if kind == "error":
            raise value
        if kind == "done":
            outcomes[number] = value
        elif kind == "report":
            reports.append(value)
            progress.told(value, 0)
        else:
            progress.told(None, value)
    known = {report.slide for report in reports}
    lost = [
        TilingReport(task.name, file=str(task.path), failed=True, note=f"slide {task.path}: {DIED}")
        for task in job.source.tasks
        if task.name not in known
    ]
    return [*outcomes.values(), WorkerResult([*reports, *lost])]


def _in_process(
    job: FeatureJob, wish: Wish, digest: str, device: str, number: int, count: int, queue: Any
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes
    end_with_launcher()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // count))

    def told(report: TilingReport | None, tiles: int) -> None:
        queue.put((number, "tiles", tiles) if report is None else (number, "report", report))

    try:
        encoder = make_encoder(wish)
        check_same(encoder, digest)
        outcome = FeatureWorker(job, encoder, device_for(device, number), told).run()
        outcome.reports = []  # which were told
        queue.put((number, "done", outcome))
    except (ValueError, OSError) as error:
        queue.put((number, "error", error))


def check_same(encoder: Encoder, digest: str) -> None:
    """Refuse an encoder with other weights than the first worker's.

    Raises:
        ValueError: they differ.
    """
    if encoder.digest() != digest:
        raise ValueError(
            "the encoder has other weights each time it is made: give --weights FILE, or have its "
            "class load them"
        )
