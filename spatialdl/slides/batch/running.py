"""Running a batch: slides planned, parts cut and slides finished by a crew, with a bar."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from functools import partial

from tqdm import tqdm

from spatialdl.errors import SlideError
from spatialdl.slides.batch.executors import BatchExecutor
from spatialdl.slides.batch.record import PartRecord
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.sharing import DIED, Work, share
from spatialdl.slides.batch.steps import (
    BatchRequest,
    Planned,
    Task,
    cut_slide,
    finish_slide,
    plan_slide,
)

# finished first, then cut: what is begun is ended before other slides are looked at
_FINISH, _CUT, _PLAN = range(3)


class BatchRun:
    """One run of a batch.

    Args:
        batch: what is asked.
        tasks: the slides.
        dry: plan only.

    Attributes:
        reports: of the slides so far, by name.
        before: names of those that were done before.
        finished: names of those that were cut.
        bytes: that would be written, before compression, of a dry run.
    """

    def __init__(self, batch: BatchRequest, tasks: Sequence[Task], *, dry: bool) -> None:
        self._batch = batch
        self._dry = dry
        # the largest first: a large one at the end would keep one process busy, the others not
        self._tasks = sorted(tasks, key=lambda task: (-task.bytes, task.name))
        self._left = sum(task.bytes for task in tasks)  # of slides that are not planned
        self._known = self._known_bytes = self._over = 0
        self.reports: dict[str, TilingReport] = {}
        self.before: list[str] = []
        self.finished: list[str] = []
        self.bytes = 0
        self._bar = tqdm(
            total=0,
            unit="strip" if batch.options.whole else "tile",
            disable=None,
            leave=False,
            smoothing=0.1,
            dynamic_ncols=True,
        )

    def go(self, crew: BatchExecutor) -> None:
        """Do all of it."""
        works = [
            Work(
                (_PLAN, order),
                partial(plan_slide, self._batch, task),
                partial(self._planned, order),
            )
            for order, task in enumerate(self._tasks)
        ]
        with self._bar:
            share(crew, works, lambda: self.watch(crew.told()))

    def watch(self, told: int) -> None:
        """Show how far it is: `told` tiles are known to be looked at."""
        bar, tiles = self._bar, max(self._over, min(told, self._known))
        # slides that were not looked at yet are taken to be as full as the others
        ahead = self._known * self._left / self._known_bytes if self._known_bytes else 0
        bar.total = round(self._known + ahead)
        bar.set_postfix_str(f"{len(self.reports)}/{len(self._tasks)} slides", refresh=False)
        bar.update(tiles - bar.n)
        bar.refresh()

    def _planned(self, order: int, found: Planned | Exception) -> Iterator[Work]:
        task = self._tasks[order]
        self._left -= task.bytes
        if isinstance(found, Exception):
            self._failed(task, found)
            return
        if found.plan is None:
            self.before.append(task.name)
        elif self._dry:
            found.report.written = len(found.parts) and (1 if found.region else found.pieces)
            self.bytes += found.bytes
        if found.plan is None or self._dry:
            self.reports[task.name] = found.report
            return
        self._known += found.pieces
        self._known_bytes += task.bytes
        parts: dict[int, PartRecord] = {}
        if not found.parts:
            yield self._finishing(order, found, [])
        for number, part in enumerate(found.parts):
            yield Work(
                (_CUT, order, number),
                partial(cut_slide, self._batch, task, found.outline(), number, part),
                partial(self._cut, order, found, parts, number),
            )

    def _cut(
        self,
        order: int,
        planned: Planned,
        parts: dict[int, PartRecord],
        number: int,
        found: PartRecord | Exception,
    ) -> Iterator[Work]:
        task = self._tasks[order]
        self._over += planned.parts[number].count
        if isinstance(found, Exception):
            if task.name not in self.reports:  # else another part of it has failed, too
                self._failed(task, found, planned.report)
            return
        parts[number] = found
        if len(parts) == len(planned.parts):
            yield self._finishing(order, planned, [parts[k] for k in sorted(parts)])

    def _finishing(self, order: int, planned: Planned, parts: list[PartRecord]) -> Work:
        task = self._tasks[order]
        return Work(
            (_FINISH, order),
            partial(finish_slide, self._batch, task, planned.outline(), parts),
            partial(self._finished, order),
        )

    def _finished(self, order: int, found: TilingReport | Exception) -> Iterator[Work]:
        task = self._tasks[order]
        if isinstance(found, Exception):
            self._failed(task, found)
        else:
            self.reports[task.name] = found
            self.finished.append(task.name)
        return iter(())

    def _failed(self, task: Task, error: Exception, so_far: TilingReport | None = None) -> None:
        report = so_far or TilingReport(task.name, file=str(task.path))
        report.failed, report.note = True, _said(task, error)
        self.reports[task.name] = report


def _said(task: Task, error: Exception) -> str:
    """An exception in words; of what nobody thought of, where it was raised goes to stderr."""
    if isinstance(error, SlideError):
        return str(error)
    if isinstance(error, BrokenExecutor):
        return f"slide {task.path}: {DIED}"
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"slide {task.path}: {error.strerror or error}{where}"
    traceback.print_exception(error, file=sys.stderr)
    return f"slide {task.path}: {type(error).__name__}: {error}"
