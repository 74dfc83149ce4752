"""What a run leaves behind: the numbers of every step, a summary, and a picture of the loss.

metrics.csv      a row a step
validation.csv   a row a validation, if there was any
predictions.csv  a row a sample of the last validation, and slides.csv a row a slide, see
                 `training.tasks.predictions`
summary.json     written at the end, whole or not at all
loss.png         loss and validation over the steps
report.html      all of it to look at, see `training.report`
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from omegaconf import DictConfig

from spatialdl.data.saving import TEMPORARY, replacing
from spatialdl.training.pictures.loss_curve import draw

log = logging.getLogger("spatialdl.trainer")

METRICS = ("step", "epoch", "loss", "learning_rate", "images_per_second", "data_wait")

_OF_VALIDATIONS = ("validation.csv", "predictions.csv", "slides.csv")


class RunDirectory:
    """The files of one run; for rank 0 only.

    Files of an earlier run in the same directory are replaced. While a file cannot be written to,
    as on a full disk, rows are kept and written later.

    Args:
        path: the directory; it is made if it is not there.
        config: the configuration of the run, as ``spatialdl.train`` composes it.
        steps: the rows of a run that goes on; see `earlier_steps`.
        validations: likewise, with the lists.
        columns: of ``metrics.csv`` beside `METRICS`; empty where an earlier run had none.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: DictConfig,
        steps: Sequence[Mapping[str, float]] = (),
        validations: Sequence[Mapping[str, Any]] = (),
        columns: Sequence[str] = (),
    ) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._config = config
        self._steps: list[dict[str, float]] = [dict(row) for row in steps]
        self._validations: list[dict[str, Any]] = [dict(row) for row in validations]
        for name in ("summary.json", "loss.png", "report.html"):
            (self.path / name).unlink(missing_ok=True)
        for left in self.path.glob(TEMPORARY):  # by a run that was killed
            left.unlink(missing_ok=True)
        self._metrics = _Table(self.path / "metrics.csv", (*METRICS, *columns), self._steps)
        self._metrics.open()
        self._validation: _Table | None = None
        if self._validations:
            self._validation = self._validation_table()
            self._validation.open()
        else:
            for name in _OF_VALIDATIONS:
                (self.path / name).unlink(missing_ok=True)

    @property
    def steps(self) -> list[dict[str, float]]:
        """All so far."""
        return self._steps

    @property
    def validations(self) -> list[dict[str, Any]]:
        """All so far, with the lists."""
        return list(self._validations)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        for table in (self._metrics, self._validation):
            if table is not None:
                table.close()

    def log_step(
        self,
        *,
        step: int,
        epoch: int,
        loss: float,
        learning_rate: float,
        images_per_second: float,
        data_wait: float,
        **more: float,
    ) -> None:
        """Append a row to ``metrics.csv``; it is on disk when this returns.

        Args:
            step: number of the optimizer step.
            epoch: number of the pass over the samples.
            loss: of the whole batch.
            learning_rate: with which the step was made.
            images_per_second: over all ranks.
            data_wait: share of the step's time, 0 to 1, that was spent waiting for data.
            more: the columns beside these.
        """
        values = (step, epoch, loss, learning_rate, images_per_second, data_wait)
        row = dict(zip(METRICS, values, strict=True)) | more
        self._steps.append(row)
        self._metrics.write_last()

    def log_validation(self, *, step: int, **metrics: Any) -> None:
        """Append a row to ``validation.csv``.

        Args:
            step: number of optimizer steps made so far.
            metrics: the same in every row, None where there is none; with the ``loss`` and the
                number of ``samples``. Lists go to ``summary.json`` only.
        """
        self._validations.append({"step": step, **metrics})
        if self._validation is None:
            self._validation = self._validation_table()
        self._validation.write_last()

    def _validation_table(self) -> _Table:
        first = self._validations[0]
        numbers = [name for name, value in first.items() if not isinstance(value, list)]
        return _Table(self.path / "validation.csv", numbers, self._validations)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json`` and ``loss.png``, and close the files.

        Args:
            summary: ``world_size``, ``peak_memory_mb`` (a list, one a rank) and whatever else is
                worth keeping. The losses, the validations, the name of the layout and the images
                per second, the first step left out, are added unless they are in it.
        """
        self.close()
        found = {
            "loss": [row["loss"] for row in self._steps],
            "images_per_second": self.images_per_second(),
            "parallel": str(self._config.parallel.name),
            "validation": self._validations,
        }
        text = json.dumps(finite({**found, **summary}), indent=2, allow_nan=False) + "\n"
        with replacing(self.path / "summary.json") as out:
            out.write(text.encode())
        if self._steps:
            draw(self.path / "loss.png", self.title(summary), self._steps, self._validations)

    def images_per_second(self) -> float | None:
        """Over all steps but the first, which also warms up."""
        rates = [row["images_per_second"] for row in self._steps]
        rates = rates[1:] or rates
        return len(rates) / sum(1 / rate for rate in rates) if rates and min(rates) > 0 else None

    def title(self, summary: Mapping[str, Any]) -> str:
        """Of the run, in a line."""
        network = str(self._config.model["_target_"]).rpartition(".")[2]
        ranks = int(summary.get("world_size", 1))
        counted = "1 rank" if ranks == 1 else f"{ranks} ranks"
        return f"{network}, parallel={self._config.parallel.name}, {counted}"


def record_of(
    resumed: tuple[Path, Mapping[str, Any]] | None,
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """The rows of steps and validations up to a checkpoint, of the run that wrote it."""
    if resumed is None:
        return [], []
    path, content = resumed
    steps = earlier_steps(path.parent.parent, content["step"])
    if len(steps) < content["step"]:
        log.warning(
            "%s has %d of the %d steps before: the curve has a gap",
            *(path.parent.parent / "metrics.csv", len(steps), content["step"]),
        )
    return steps, content["validations"]


def finite(value: Any) -> Any:
    """JSON knows neither infinity nor NaN: they become null."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


class _Table:
    """A CSV file; a row is on disk when `write_last` returns, or it failed, which is said once.

    Args:
        rows: which others add to; these columns of them are written.
    """

    def __init__(self, path: Path, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
        self._path, self._columns, self._rows = path, columns, rows
        self._warned = False
        self._file: IO[str] | None = None

    def open(self) -> None:
        """Write the rows that are there.

        Raises:
            OSError: it cannot be written.
        """
        self._file = self._written()

    def _values(self, row: Mapping[str, Any]) -> list[Any]:
        return [row.get(name, "") for name in self._columns]

    def write_last(self) -> None:
        """One more row has come."""
        try:
            if self._file is None:
                self._file = self._written()
            else:
                csv.writer(self._file).writerow(self._values(self._rows[-1]))
                self._file.flush()
        except OSError as error:
            self._drop()
            if not self._warned:
                self._warned = True
                log.warning("%s: %s; rows are kept, and written when that ends", self._path, error)

    def _written(self) -> IO[str]:
        """All rows so far in a new file, which is open for more."""
        with replacing(self._path) as new:
            text = io.TextIOWrapper(new, newline="", write_through=True)
            csv.writer(text).writerows([self._columns, *map(self._values, self._rows)])
            text.detach()
        return self._path.open("a", newline="")

    def _drop(self) -> None:
        """Half a row may be in the file, or in its buffer: it is written anew."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def close(self) -> None:
        if self._file is None:
            self._file = self._written()
        self._file.close()


def earlier_steps(run_dir: Path, step: int) -> list[dict[str, float]]:
    """The rows of a run's ``metrics.csv`` up to a step; nothing if it is not there."""
    try:
        with (run_dir / "metrics.csv").open(newline="") as lines:
            found = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    rows = (_numbers(row) for row in found)
    return [row for row in rows if row is not None and row["step"] <= step]


def _numbers(row: Mapping[str, Any]) -> dict[str, float] | None:
    """A row read back; None for half a row, of a run that was killed."""
    try:
        values = {name: _number(row[name] or "") for name in METRICS}
        more = {name: _number(text) for name, text in row.items() if name not in values and text}
    except (KeyError, ValueError, AttributeError):  # or a row that is too long
        return None
    return values | more


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)
