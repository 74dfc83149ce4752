"""Reporting of a run on rank 0: console, loggers, files of the run directory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from spatialdl.training.console.progress import StepProgress
from spatialdl.training.console.validation_table import scalar_metrics, validation_table
from spatialdl.training.loggers import Loggers
from spatialdl.training.report import save_report
from spatialdl.training.run_directory import RunDirectory, record_of
from spatialdl.training.tasks.metrics import Scores

log = logging.getLogger("spatialdl.trainer")


class Reporter:
    """Passes events of a run to the console, the loggers and the run directory.

    Args:
        config: configuration of the run.
        run_dir: run directory.
        steps: optimizer steps of the whole run.
        table: start table, printed first.
        names: class or target names.
        columns: additional columns of ``metrics.csv``.
        resumed: path and content of the checkpoint of a resumed run.
    """

    def __init__(
        self,
        config: DictConfig,
        run_dir: Path,
        *,
        steps: int,
        table: str,
        names: Sequence[str],
        columns: Sequence[str],
        resumed: tuple[Path, Mapping[str, Any]] | None,
    ) -> None:
        self._config, self._table, self._names = config, table, names
        log.info("%s", table)
        self._open = ExitStack()
        earlier = record_of(resumed)
        self.record = self._open.enter_context(
            RunDirectory(run_dir, config, *earlier, columns=columns)
        )
        done = 0 if resumed is None else int(resumed[1]["step"])
        self.loggers = Loggers(config, run_dir, done)
        self._open.callback(self.loggers.close)
        self._progress = self._open.enter_context(StepProgress(steps, done))

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._open.__exit__(*raised)

    def step(self, row: Mapping[str, float], memory_mb: float) -> None:
        """Report a step.

        Args:
            row: values of ``metrics.csv`` by column.
            memory_mb: peak memory of rank 0 so far, in 2**20 bytes.
        """
        self.record.log_step(row)
        logged = {name: value for name, value in row.items() if name != "step"}
        self.loggers.log("train", int(row["step"]), {**logged, "memory_mb": memory_mb})
        self._progress.update(row, memory_mb)

    def validated(self, step: int, metrics: Scores) -> None:
        """Report the metrics of a validation after `step` steps."""
        earlier = self.record.validations
        before = earlier[-1] if earlier else None
        log.info("%s", validation_table(metrics, step, self._names, before))
        self.record.log_validation(step=step, **metrics)
        scalars = scalar_metrics(metrics)
        defined = {name: value for name, value in scalars.items() if value is not None}
        self.loggers.log("validation", step, defined)

    def finish(self, summary: Mapping[str, Any], early: str = "") -> None:
        """Report the end of the run; `early` is the reason if it ends before its last step."""
        path = self.record.path
        if early:
            log.info("%s", early)
        self.record.finish(summary)
        log.info("run directory: %s", path)
        log.info("loss curve:    %s", path / "loss.png")
        self._report(summary, early)
        step = int(self.record.steps[-1]["step"]) if self.record.steps else 0
        for picture in (path / "loss.png", self._timeline()):
            if self.loggers and picture is not None and picture.is_file():
                pixels = np.asarray(Image.open(picture).convert("RGB"))
                self.loggers.log_image(step, f"run/{picture.stem}", pixels)

    def stopped(self, summary: Mapping[str, Any], why: str) -> None:
        """Write the report of a run that was stopped."""
        self._report(summary, why)

    def _report(self, summary: Mapping[str, Any], ended: str = "") -> None:
        if not self._config.trainer.report:
            return
        path = self.record.path
        try:
            save_report(
                path / "report.html",
                title=self.record.title(summary),
                config=self._config,
                overrides=_overrides(path),
                table=self._table,
                names=self._names,
                steps=self.record.steps,
                validations=self.record.validations,
                summary={"images_per_second": self.record.images_per_second(), **summary},
                timeline=self._timeline(),
                ended=ended,
            )
            log.info("report:        %s", path / "report.html")
        except Exception as error:  # a failed report must not abort the run
            log.warning("cannot write the report: %s", error)

    def _timeline(self) -> Path | None:
        """Timeline of this run; without a trace, the file is of an earlier run."""
        path = self.record.path / "timeline.png"
        return path if self._config.trainer.trace and path.is_file() else None


def _overrides(run_dir: Path) -> list[str]:
    """Command-line overrides of the run, as Hydra stored them."""
    try:
        words = OmegaConf.load(run_dir / ".hydra" / "overrides.yaml")
        return [str(word) for word in OmegaConf.to_container(words, resolve=False) or ()]
    except OSError:
        return []
