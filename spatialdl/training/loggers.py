"""Loggers of a run; one that fails is disabled for the rest of the run."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from omegaconf import DictConfig, OmegaConf

from spatialdl.common.text import without_passwords

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Picture = npt.NDArray[np.uint8]
    """RGB pixels, (rows, columns, 3)."""

log = logging.getLogger("spatialdl.loggers")

_LONGEST, _AT_ONCE = 500, 100  # characters of a value, and values per call, that all stores accept


def check_loggers(settings: Mapping[str, Any]) -> None:
    """Check that loggers exist and their packages are installed.

    Args:
        settings: group ``logger`` of the configuration.

    Raises:
        ValueError: if a logger is unknown, or its package is missing.
    """
    for name in settings:
        if name != "csv" and name not in LOGGERS:
            raise ValueError(f"logger={name} is unknown: use some of csv, {', '.join(LOGGERS)}")
        if name != "csv" and find_spec(name) is None:
            raise ValueError(
                f'logger={name} needs the package {name}: pip install "spatialdl[{name}]"'
            )


class Logger(Protocol):
    """Logger of a run on rank 0; after any exception it is not called again.

    Args:
        settings: settings of the logger.
        run_dir: run directory.
        config: the nested configuration of the run, without passwords.
        done: steps done before the run was resumed.
    """

    def __init__(
        self, settings: DictConfig, run_dir: Path, config: Mapping[str, Any], done: int
    ) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values by name, ``train/loss`` or ``validation/accuracy``, after a step."""

    def log_image(self, step: int, name: str, picture: Picture) -> None:
        """Log a picture; pictures of one name form a series."""

    def finish(self) -> None:
        """Close the logger."""


class TensorBoard:
    """Event files in the folder ``tensorboard`` of the run directory."""

    def __init__(
        self, settings: DictConfig, run_dir: Path, config: Mapping[str, Any], done: int
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # events of later steps are those of a run that was killed
        self._writer: Any = SummaryWriter(run_dir / "tensorboard", purge_step=done + 1)
        text = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
        self._writer.add_text("config", f"```yaml\n{text}```", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_image(self, step: int, name: str, picture: Picture) -> None:
        self._writer.add_image(name, picture, step, dataformats="HWC")

    def finish(self) -> None:
        self._writer.close()


class WandB:
    """W&B run; resumes that of the run directory."""

    def __init__(
        self, settings: DictConfig, run_dir: Path, config: Mapping[str, Any], done: int
    ) -> None:
        import wandb

        known = run_dir / "wandb.id"
        self._run: Any = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or run_dir.name,
            mode=settings.mode,
            dir=str(run_dir),
            id=known.read_text().strip() if known.is_file() else None,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        known.write_text(f"{self._run.id}\n")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **values})

    def log_image(self, step: int, name: str, picture: Picture) -> None:
        import wandb

        self.log(step, {name: wandb.Image(picture)})

    def finish(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow run of an experiment, which is created if missing; resumes that of the run directory.

    MLflow does not allow another configuration in a resumed run.
    """

    def __init__(
        self, settings: DictConfig, run_dir: Path, config: Mapping[str, Any], done: int
    ) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        own = f"sqlite:///{(run_dir / 'mlflow.db').absolute()}"
        uri = settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or own
        self._client = MlflowClient(tracking_uri=uri)
        known = run_dir / "mlflow.id"
        if known.is_file():
            self._id = known.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(settings.experiment)
        number = experiment.experiment_id if experiment else None
        if number is None:
            files = (run_dir / "mlflow").absolute().as_uri() if uri == own else None
            number = self._client.create_experiment(settings.experiment, files)
        name = settings.name or run_dir.name
        self._id = self._client.create_run(number, run_name=name).info.run_id
        known.write_text(f"{self._id}\n")
        params = [Param(name, str(value)[:_LONGEST]) for name, value in _flat(config)]
        for first in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._id, params=params[first : first + _AT_ONCE])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [
            Metric(name, value, now, step)
            for name, value in values.items()
            if math.isfinite(value)  # databases accept only finite numbers
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def log_image(self, step: int, name: str, picture: Picture) -> None:
        from PIL import Image

        self._client.log_image(self._id, Image.fromarray(picture), f"{name}/{step:08d}.png")

    def finish(self) -> None:
        self._client.set_terminated(self._id)


LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""Loggers by name, which is that of the package that each needs."""


class Loggers:
    """Loggers of a run; a logger that raises is closed with a warning.

    Args:
        config: configuration of the run.
        run_dir: run directory.
        done: steps done before the run was resumed.
    """

    def __init__(self, config: DictConfig, run_dir: Path, done: int) -> None:
        self._open: dict[str, Logger] = {}
        plain = without_passwords(OmegaConf.to_container(config, resolve=True))
        for name, settings in (config.get("logger") or {}).items():
            if name != "csv":
                try:
                    self._open[name] = LOGGERS[name](settings, run_dir, plain, done)
                except Exception as error:
                    _warn(name, error)

    def __bool__(self) -> bool:
        return bool(self._open)

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        named = {f"{phase}/{name}": value for name, value in values.items()}
        self._each(lambda one: one.log(step, named))

    def log_image(self, step: int, name: str, picture: Picture) -> None:
        self._each(lambda one: one.log_image(step, name, picture))

    def close(self) -> None:
        while self._open:
            name, logger = self._open.popitem()
            try:
                logger.finish()
            except Exception as error:
                _warn(name, error)

    def _each(self, call: Callable[[Logger], None]) -> None:
        for name, logger in list(self._open.items()):
            try:
                call(logger)
            except Exception as error:
                _warn(name, error)
                del self._open[name]
                with suppress(Exception):
                    logger.finish()


def _warn(name: str, error: Exception) -> None:
    text = without_passwords(" ".join(str(error).split())) or type(error).__name__
    log.warning("logger=%s: %s; training continues without it", name, text)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested settings to dotted names."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
