"""Workers of a run: this process, or several on this machine, over its devices in turn."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from queue import Empty
from typing import Any

import torch
from tqdm import tqdm

from spatialdl.comm.capacity import usable_cores
from spatialdl.comm.device_path import current_device
from spatialdl.comm.launch import end_with_launcher
from spatialdl.features.encoders.encoder import Encoder, Wish
from spatialdl.features.encoders.making import make_encoder
from spatialdl.features.working import FeatureJob, FeatureWorker, WorkerResult
from spatialdl.slides.batch.executors import DIED
from spatialdl.slides.batch.report import TilingReport
from spatialdl.text import counted

_POLL_S = 0.5  # interval at which the parent checks that its processes are alive


class SlideProgress:
    """A progress bar of slides, with the number of tiles.

    Args:
        slides: number of slides of the run.
        job: the job, if only this one of several workers reports; slides are then counted by the
            claims of all workers.
    """

    def __init__(self, slides: int, job: FeatureJob | None = None) -> None:
        self._bar = tqdm(
            total=slides, unit="slide", disable=None, leave=False, dynamic_ncols=True, miniters=0
        )
        self._tiles, self._job = 0, job

    def update(self, report: TilingReport | None, tiles: int) -> None:
        """Advance the bar; the callback of `FeatureWorker`."""
        self._tiles += tiles
        if self._bar.disable:
            return
        self._bar.set_postfix_str(counted(self._tiles, "tile"), refresh=False)
        done = 0 if report is None else 1
        if self._job is not None and report is not None:
            done = max(0, self._job.claims.taken() - self._bar.n)
        self._bar.update(done)

    def close(self) -> None:
        """Erase the bar."""
        self._bar.close()


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


def run_single_process(
    job: FeatureJob, encoder: Encoder, device: torch.device
) -> list[WorkerResult]:
    """Run the job in this process."""
    progress = SlideProgress(len(job.source.tasks))
    try:
        return [FeatureWorker(job, encoder, device, progress.update).run()]
    finally:
        progress.close()


def run_processes(
    job: FeatureJob, wish: Wish, digest: str, device: str, count: int
) -> list[WorkerResult]:
    """Run the job in several processes; slides of a process that dies are reported as failed.

    Args:
        wish: request from which each process makes its encoder.
        digest: digest of the weights, which must be the same in all processes.
        device: value of `--device`.
        count: number of processes.

    Raises:
        ValueError, OSError: a process failed.
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
            number, kind, value = queue.get(timeout=_POLL_S)
        except Empty:
            alive = [process.is_alive() for process in processes]
            if dead:  # and the queue has been empty since
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
            progress.update(value, 0)
        else:
            progress.update(None, value)
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent terminates its processes
    end_with_launcher()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // count))

    def report_progress(report: TilingReport | None, tiles: int) -> None:
        queue.put((number, "tiles", tiles) if report is None else (number, "report", report))

    try:
        encoder = make_encoder(wish)
        check_same(encoder, digest)
        outcome = FeatureWorker(job, encoder, device_for(device, number), report_progress).run()
        outcome.reports = []  # sent one by one
        queue.put((number, "done", outcome))
    except (ValueError, OSError) as error:
        queue.put((number, "error", error))


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
