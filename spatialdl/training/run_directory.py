"""Output files of a run.

metrics.csv      one row per step
validation.csv   one row per validation, if any
predictions.csv  one row per sample of the last validation; slides.csv one row per slide, see
                 `training.tasks.predictions`
summary.json     written atomically at the end
loss.png         loss, validation metrics, learning rate and speed over steps
report.html      HTML report, see `training.report`
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

from spatialdl.common.files import TEMPORARY, replacing
from spatialdl.training.pictures.curves import draw_curves

log = logging.getLogger("spatialdl.trainer")

METRICS = ("step", "epoch", "loss", "learning_rate", "images_per_second", "data_wait")

_OF_VALIDATIONS = ("validation.csv", "predictions.csv", "slides.csv")


class RunDirectory:
    """Files of one run, written by rank 0.

    Files of an earlier run in the same directory are replaced. While a file cannot be written,
    for example on a full disk, rows are buffered and written later.

    Args:
        path: run directory, created if missing.
        config: configuration of the run, as ``spatialdl.train`` composes it.
        steps: rows of a resumed run, see `earlier_steps`.
        validations: metrics of earlier validations of a resumed run, lists included.
        columns: columns of ``metrics.csv`` besides `METRICS`; empty cells for earlier rows without.
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
        for left in self.path.glob(TEMPORARY):  # of a run that was killed
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
        """Rows of all steps so far."""
        return self._steps

    @property
    def validations(self) -> list[dict[str, Any]]:
        """Metrics of all validations so far, lists included."""
        return list(self._validations)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        for table in (self._metrics, self._validation):
            if table is not None:
                table.close()

    def log_step(self, row: Mapping[str, float]) -> None:
        """Append a row to ``metrics.csv`` and flush it.

        Args:
            row: values by column: those of `METRICS`, of which ``loss`` is that of the whole batch,
                ``images_per_second`` of all ranks, and ``data_wait`` the share of the step's time,
                0 to 1; and further ones.
        """
        self._steps.append(dict(row))
        self._metrics.write_last()

    def log_validation(self, *, step: int, **metrics: Any) -> None:
        """Append a row to ``validation.csv``.

        Args:
            step: optimizer steps so far.
            metrics: ``loss``, ``samples`` and further metrics, the same names in every row, None
                if undefined. Lists are only written to ``summary.json``.
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
            summary: ``world_size``, ``peak_memory_mb`` (one per rank) and further values. Losses,
                validations, the name of the layout and images per second (without the first step)
                are added unless present.
        """
        self.close()
        results = {
            "loss": [row["loss"] for row in self._steps],
            "images_per_second": self.images_per_second(),
            "parallel": str(self._config.parallel.name),
            "validation": self._validations,
        }
        text = json.dumps(finite({**results, **summary}), indent=2, allow_nan=False) + "\n"
        with replacing(self.path / "summary.json") as out:
            out.write(text.encode())
        if self._steps:
            draw_curves(self.title(summary), self._steps, self._validations).savefig(
                self.path / "loss.png"
            )

    def images_per_second(self) -> float | None:
        """Mean throughput of all steps except the first, the warm-up."""
        rates = [row["images_per_second"] for row in self._steps]
        rates = rates[1:] or rates
        return len(rates) / sum(1 / rate for rate in rates) if rates and min(rates) > 0 else None

    def title(self, summary: Mapping[str, Any]) -> str:
        """One-line title of the run."""
        network = str(self._config.model["_target_"]).rpartition(".")[2]
        ranks = int(summary.get("world_size", 1))
        counted = "1 rank" if ranks == 1 else f"{ranks} ranks"
        return f"{network}, parallel={self._config.parallel.name}, {counted}"


def record_of(
    resumed: tuple[Path, Mapping[str, Any]] | None,
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Steps and validations up to a checkpoint, of the run that wrote it."""
    if resumed is None:
        return [], []
    path, content = resumed
    steps = earlier_steps(path.parent.parent, content["step"])
    if len(steps) < content["step"]:
        log.warning(
            "%s has only %d of the %d earlier steps: the loss curve has a gap",
            *(path.parent.parent / "metrics.csv", len(steps), content["step"]),
        )
    return steps, content["validations"]


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


class _Table:
    """CSV file that is flushed after each row; the first failure is logged.

    Args:
        path: the file.
        columns: columns to write.
        rows: all rows, to which the caller appends.
    """

    def __init__(self, path: Path, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
        self._path, self._columns, self._rows = path, columns, rows
        self._warned = False
        self._file: IO[str] | None = None

    def open(self) -> None:
        """Write the existing rows.

        Raises:
            OSError: if the file cannot be written.
        """
        self._file = self._rewrite()

    def _values(self, row: Mapping[str, Any]) -> list[Any]:
        return [row.get(name, "") for name in self._columns]

    def write_last(self) -> None:
        """Append the last row."""
        try:
            if self._file is None:
                self._file = self._rewrite()
            else:
                csv.writer(self._file).writerow(self._values(self._rows[-1]))
                self._file.flush()
        except OSError as error:
            self._drop()
            if not self._warned:
                self._warned = True
                log.warning("%s: %s; rows are buffered and written later", self._path, error)

    def _rewrite(self) -> IO[str]:
        """Write all rows to a new file and open it for appending."""
        with replacing(self._path) as new:
            text = io.TextIOWrapper(new, newline="", write_through=True)
            csv.writer(text).writerows([self._columns, *map(self._values, self._rows)])
            text.detach()
        return self._path.open("a", newline="")

    def _drop(self) -> None:
        """Drop the file, which may have half a row, to write it anew."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def close(self) -> None:
        if self._file is None:
            self._file = self._rewrite()
        self._file.close()


def earlier_steps(run_dir: Path, step: int) -> list[dict[str, float]]:
    """Read ``metrics.csv`` of a run up to a step; empty if it cannot be read."""
    try:
        with (run_dir / "metrics.csv").open(newline="") as lines:
            texts = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    rows = (_numbers(row) for row in texts)
    return [row for row in rows if row is not None and row["step"] <= step]


def _numbers(row: Mapping[str, Any]) -> dict[str, float] | None:
    """Parse a row; None for the incomplete row of a run that was killed."""
    try:
        values = {name: _number(row[name] or "") for name in METRICS}
        more = {name: _number(text) for name, text in row.items() if name not in values and text}
    except (KeyError, ValueError, AttributeError):  # or a row that is too long
        return None
    return values | more


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)
