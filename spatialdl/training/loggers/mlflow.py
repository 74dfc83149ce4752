"""MLflow logger."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from omegaconf import DictConfig
from PIL import Image

from spatialdl.training.loggers.logger import Picture

_LONGEST, _AT_ONCE = 500, 100  # characters of a value, and values per call, that all stores accept


class MLflow:
    """MLflow run of an experiment, which is created if missing; resumes that of the run directory.

    Args:
        settings: ``tracking_uri``, ``experiment`` and ``name``.
        run_dir: run directory.
    """

    def __init__(self, settings: DictConfig, run_dir: Path) -> None:
        own = f"sqlite:///{(run_dir / 'mlflow.db').absolute()}"
        uri = settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or own
        files = (run_dir / "mlflow").absolute().as_uri() if uri == own else None
        self._client = MlflowClient(tracking_uri=uri)
        known = run_dir / "mlflow.id"
        self._is_resumed = known.is_file()
        if self._is_resumed:
            self._id = known.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(settings.experiment)
        number = experiment.experiment_id if experiment else None
        if number is None:
            number = self._client.create_experiment(settings.experiment, files)
        name = settings.name or run_dir.name
        self._id = self._client.create_run(number, run_name=name).info.run_id
        known.write_text(f"{self._id}\n")

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the configuration of a new run; MLflow does not allow changes in a resumed one."""
        if not self._is_resumed:
            params = [Param(name, str(value)[:_LONGEST]) for name, value in flat(config)]
            for first in range(0, len(params), _AT_ONCE):
                self._client.log_batch(self._id, params=params[first : first + _AT_ONCE])

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        self._log("train", step, values)

    def log_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log("validation", step, metrics)

    def log_image(self, step: int, name: str, picture: Picture) -> None:
        file = f"{name}/{step:08d}.png"
        self._client.log_image(self._id, Image.fromarray(picture), file)

    def finish(self) -> None:
        self._client.set_terminated(self._id)

    def _log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        metrics = [
            Metric(f"{phase}/{name}", value, now, step)
            for name, value in values.items()
            if math.isfinite(value)  # databases accept only finite numbers
        ]
        self._client.log_batch(self._id, metrics=metrics)


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested settings to dotted names."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
