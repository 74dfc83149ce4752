"""Run of a batch: slides planned, cut and finished on an executor, with a progress bar."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from functools import partial

from tqdm import tqdm

from spatialdl.errors import SlideError
from spatialdl.slides.batch.executors import DIED, BatchExecutor, Work, share
from spatialdl.slides.batch.record import PartRecord
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.steps import (
    BatchRequest,
    Planned,
    Task,
    cut_slide,
    finish_slide,
    plan_slide,
)

# slides in progress are completed before others are planned
_FINISH, _CUT, _PLAN = range(3)


class BatchRun:
    """One run of a batch.

    Args:
        batch: parameters.
        tasks: the slides.
        dry: plan only.

    Attributes:
        reports: of the slides so far, by name.
        before: names of slides done by an earlier run.
        finished: names of slides cut by this run.
        bytes: of a dry run: bytes that would be written, before compression.
    """

    def __init__(self, batch: BatchRequest, tasks: Sequence[Task], *, dry: bool) -> None:
        self._batch = batch
        self._dry = dry
        # largest first: with a large slide at the end all processes but one would be idle
        self._tasks = sorted(tasks, key=lambda task: (-task.bytes, task.name))
        self.reports: dict[str, TilingReport] = {}
        self.before: list[str] = []
        self.finished: list[str] = []
        self.bytes = 0
        self._bar = tqdm(
            total=0,
            unit="strip" if batch.options.whole else "tile",
            disable=None,
            leave=False,
        )

    def go(self, executor: BatchExecutor) -> None:
        """Run the batch on an executor."""
        works = [
            Work(
                (_PLAN, order),
                partial(plan_slide, self._batch, task),
                partial(self._planned, order),
            )
            for order, task in enumerate(self._tasks)
        ]
        with self._bar:
            share(executor, works)

    def _planned(self, order: int, planned: Planned | Exception) -> Iterator[Work]:
        task = self._tasks[order]
        if isinstance(planned, Exception):
            self._failed(task, planned)
            return
        if planned.plan is None:
            self.before.append(task.name)
        elif self._dry:
            planned.report.written = len(planned.parts) and (
                1 if planned.region else planned.pieces
            )
            self.bytes += planned.bytes
        if planned.plan is None or self._dry:
            self.reports[task.name] = planned.report
            return
        self._bar.total += planned.pieces  # so far: later slides are not planned yet
        parts: dict[int, PartRecord] = {}
        if not planned.parts:
            yield self._finishing(order, planned, [])
        for number, part in enumerate(planned.parts):
            yield Work(
                (_CUT, order, number),
                partial(cut_slide, self._batch, task, planned.outline(), number, part),
                partial(self._cut, order, planned, parts, number),
            )

    def _cut(
        self,
        order: int,
        planned: Planned,
        parts: dict[int, PartRecord],
        number: int,
        part: PartRecord | Exception,
    ) -> Iterator[Work]:
        task = self._tasks[order]
        self._bar.set_postfix_str(f"{len(self.reports)}/{len(self._tasks)} slides", refresh=False)
        self._bar.update(planned.parts[number].count)
        if isinstance(part, Exception):
            if task.name not in self.reports:  # else another part of the slide failed before
                self._failed(task, part, planned.report)
            return
        parts[number] = part
        if len(parts) == len(planned.parts):
            yield self._finishing(order, planned, [parts[k] for k in sorted(parts)])

    def _finishing(self, order: int, planned: Planned, parts: list[PartRecord]) -> Work:
        task = self._tasks[order]
        return Work(
            (_FINISH, order),
            partial(finish_slide, self._batch, task, planned.outline(), parts),
            partial(self._finished, order),
        )

    def _finished(self, order: int, report: TilingReport | Exception) -> Iterator[Work]:
        task = self._tasks[order]
        if isinstance(report, Exception):
            self._failed(task, report)
        else:
            self.reports[task.name] = report
            self.finished.append(task.name)
        return iter(())

    def _failed(self, task: Task, error: Exception, so_far: TilingReport | None = None) -> None:
        report = so_far or TilingReport(task.name, file=str(task.path))
        report.failed, report.note = True, _message(task, error)
        self.reports[task.name] = report


def _message(task: Task, error: Exception) -> str:
    """Message of an exception; the traceback of an unexpected one is printed to stderr."""
    if isinstance(error, SlideError):
        return str(error)
    if isinstance(error, BrokenExecutor):
        return f"slide {task.path}: {DIED}"
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"slide {task.path}: {error.strerror or error}{where}"
    traceback.print_exception(error, file=sys.stderr)
    return f"slide {task.path}: {type(error).__name__}: {error}"
