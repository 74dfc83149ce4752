"""Loggers of a configuration; one that fails is disabled for the rest of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from spatialdl.text import without_passwords

if TYPE_CHECKING:
    from spatialdl.training.loggers.logger import Logger, Picture

log = logging.getLogger("spatialdl.loggers")

PACKAGES = {"csv": None, "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Package required by each logger."""


def check_loggers(settings: Mapping[str, Any]) -> None:
    """Check that loggers exist and their packages are installed.

    Args:
        settings: group ``logger`` of the configuration.

    Raises:
        ValueError: if a logger is unknown, or its package is missing.
    """
    for name in settings:
        if name not in PACKAGES:
            raise ValueError(f"logger={name} is unknown: use some of {', '.join(PACKAGES)}")
        package = PACKAGES[name]
        if package is not None and find_spec(package) is None:
            raise ValueError(
                f'logger={name} needs the package {package}: pip install "spatialdl[{name}]"'
            )


def wants_images(settings: Mapping[str, Any]) -> bool:
    """Whether the configuration has a logger that takes sample pictures."""
    return any(bool(one.get("images")) for one in settings.values())


class Loggers:
    """Loggers of a run; a logger that raises is closed with a warning.

    Args:
        config: configuration of the run.
        run_dir: run directory.
        done: steps done before the run was resumed.

    Attributes:
        take_images: whether a logger takes pictures.
    """

    def __init__(self, config: DictConfig, run_dir: Path, done: int) -> None:
        self._open: dict[str, Logger] = {}
        self.take_images = wants_images(config.get("logger") or {})
        plain = without_passwords(OmegaConf.to_container(config, resolve=True))
        for name, settings in (config.get("logger") or {}).items():
            if name != "csv":
                self._start(str(name), settings, run_dir, done)
        self._each(lambda one: one.log_config({str(key): value for key, value in plain.items()}))

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda one: one.log_step(step, values))

    def log_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda one: one.log_validation(step, metrics))

    def log_image(self, step: int, name: str, picture: Picture) -> None:
        self._each(lambda one: one.log_image(step, name, picture))

    def close(self) -> None:
        while self._open:
            name, logger = self._open.popitem()
            try:
                logger.finish()
            except Exception as error:
                _warn(name, error)

    def _start(self, name: str, settings: DictConfig, run_dir: Path, done: int) -> None:
        try:
            self._open[name] = _logger(name, settings, run_dir, done)
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


def _logger(name: str, settings: DictConfig, run_dir: Path, done: int) -> Logger:
    if name == "tensorboard":
        from spatialdl.training.loggers.tensorboard import TensorBoard

        return TensorBoard(run_dir, done)
    if name == "wandb":
        from spatialdl.training.loggers.wandb import WandB

        return WandB(settings, run_dir)
    from spatialdl.training.loggers.mlflow import MLflow

    return MLflow(settings, run_dir)


def _warn(name: str, error: Exception) -> None:
    text = without_passwords(" ".join(str(error).split())) or type(error).__name__
    log.warning("logger=%s: %s; training continues without it", name, text)
