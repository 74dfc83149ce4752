"""Training progress: a bar in a terminal, occasional lines in a log file."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from spatialdl.comm.launch import TERMINAL
from spatialdl.common.text import progress_bar, readable_bytes

if TYPE_CHECKING:
    from tqdm import tqdm

log = logging.getLogger("spatialdl.progress")

_LINES = 10  # in a log file, evenly over the run
_LINE_EVERY_S = 60.0  # and at least one in this interval


class StepProgress:
    """Progress of a run in optimizer steps, shown on rank 0.

    In a terminal, log messages appear above the bar.

    Args:
        steps: optimizer steps of the whole run.
        done: steps done before the run was resumed.
        terminal: whether to draw a bar; by default `has_terminal`.
    """

    def __init__(self, steps: int, done: int = 0, terminal: bool | None = None) -> None:
        self._steps = steps
        self._step = self._done = done
        self._terminal = has_terminal() if terminal is None else terminal
        self._open = ExitStack()
        self._bar: tqdm[Any] | None = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> StepProgress:
        if self._terminal:
            from tqdm.contrib.logging import logging_redirect_tqdm

            root = logging.getLogger()
            filters = [one for handler in root.handlers for one in handler.filters]
            self._open.enter_context(logging_redirect_tqdm())
            for handler in root.handlers:  # tqdm has replaced the handlers
                for one in filters:
                    handler.addFilter(one)
            bar = progress_bar(
                None,
                "steps",
                "step",
                total=self._steps,
                initial=self._done,
                disable=False,
                leave=True,
            )
            self._bar = self._open.enter_context(bar)
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def update(self, row: Mapping[str, float], memory_mb: float) -> None:
        """Advance by one step.

        Args:
            row: values of the step, see `RunDirectory.log_step`.
            memory_mb: peak memory of this rank so far, in 2**20 bytes.
        """
        self._step += 1
        status = (
            f"loss {row['loss']:.4g}, lr {row['learning_rate']:.3g}, "
            f"{row['images_per_second']:.3g} images/s, data wait {row['data_wait']:.0%}, "
            f"memory {readable_bytes(round(memory_mb * 2**20))}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(status, refresh=False)
            self._bar.update()
        elif self._is_worth_a_line():
            self._last_line = time.monotonic()
            log.info("step %d of %d: %s, %s left", self._step, self._steps, status, self._left())

    def _is_worth_a_line(self) -> bool:
        if self._step - self._done == 1 or self._step == self._steps:
            return True
        if time.monotonic() - self._last_line > _LINE_EVERY_S:
            return True
        return self._step * _LINES // self._steps > (self._step - 1) * _LINES // self._steps

    def _left(self) -> timedelta:
        per_step = (time.monotonic() - self._started) / (self._step - self._done)
        return timedelta(seconds=round(per_step * max(0, self._steps - self._step)))


def has_terminal() -> bool:
    """Whether this process, or the one that started its rank, has a terminal."""
    return sys.stderr.isatty() or TERMINAL in os.environ
