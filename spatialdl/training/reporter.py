"""What a run tells while it goes on: the console, the files of its directory; on rank 0."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from omegaconf import DictConfig

from spatialdl.training.loggers.choosing import Loggers
from spatialdl.training.metrics import Scores
from spatialdl.training.progress import Progress
from spatialdl.training.run_directory import RunDirectory, record_of
from spatialdl.training.validation_table import metrics_of, validation_table

log = logging.getLogger("spatialdl.trainer")

_NOT_FINITE = "step %d: the loss is %s: lower optimizer.lr? debug=detect_nan tells where it began"


class Reporter:
    """Hands what happens on to all who tell or keep it.

    Args:
        config: of the run.
        run_dir: its directory.
        steps: of the whole run.
        names: of the classes or targets.
        columns: of ``metrics.csv`` beside the usual.
        resumed: the checkpoint from which the run goes on, and its contents.
    """

    def __init__(
        self,
        config: DictConfig,
        run_dir: Path,
        *,
        steps: int,
        names: Sequence[str],
        columns: Sequence[str],
        resumed: tuple[Path, Mapping[str, Any]] | None,
    ) -> None:
        self._names = names
        self._open = ExitStack()
        earlier = record_of(resumed)
        self.record = self._open.enter_context(
            RunDirectory(run_dir, config, *earlier, columns=columns)
        )
        done = 0 if resumed is None else int(resumed[1]["step"])
        self.loggers = Loggers(config, run_dir, done)
        self._open.callback(self.loggers.close)
        self._progress = self._open.enter_context(Progress(steps, done))
        self._warned = False

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, where)

    @property
    def validations(self) -> list[dict[str, Any]]:
        """All so far."""
        return self.record.validations

    def step(
        self,
        *,
        step: int,
        epoch: int,
        loss: float,
        learning_rate: float,
        images_per_second: float,
        data_wait: float,
        memory_mb: float,
        **more: float,
    ) -> None:
        """A step is done; see `RunDirectory.log_step` and `Progress.update`."""
        shown = {
            "loss": loss,
            "learning_rate": learning_rate,
            "images_per_second": images_per_second,
            "data_wait": data_wait,
        }
        self.record.log_step(step=step, epoch=epoch, **shown, **more)
        self.loggers.log_step(step, {**shown, **more, "epoch": epoch, "memory_mb": memory_mb})
        if not math.isfinite(loss) and not self._warned:
            self._warned = True
            log.warning(_NOT_FINITE, step, loss)
        self._progress.update(memory_mb=memory_mb, **shown)

    def validated(self, step: int, found: Scores) -> None:
        """All validation samples were looked at, after so many steps."""
        earlier = self.record.validations
        before = earlier[-1] if earlier else None
        log.info("%s", validation_table(found, step, self._names, before))
        self.record.log_validation(step=step, **found)
        known = metrics_of(found)
        self.loggers.log_validation(step, {k: v for k, v in known.items() if v is not None})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has come to its end."""
        self.record.finish(summary)
        log.info("run directory: %s", self.record.path)
        log.info("loss curve:    %s", self.record.path / "loss.png")
