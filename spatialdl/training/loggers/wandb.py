"""Weights & Biases logger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb
from omegaconf import DictConfig

from spatialdl.training.loggers.logger import Picture


class WandB:
    """W&B run; resumes that of the run directory.

    Args:
        settings: ``project``, ``entity``, ``name`` and ``mode``.
        run_dir: run directory.
    """

    def __init__(self, settings: DictConfig, run_dir: Path) -> None:
        known = run_dir / "wandb.id"
        identity = known.read_text().strip() if known.is_file() else None
        self._run: Any = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or run_dir.name,
            mode=settings.mode,
            dir=str(run_dir),
            id=identity,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        known.write_text(f"{self._run.id}\n")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, {f"train/{name}": value for name, value in values.items()})

    def log_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, {f"validation/{name}": value for name, value in metrics.items()})

    def log_image(self, step: int, name: str, picture: Picture) -> None:
        self._log(step, {name: wandb.Image(picture)})

    def finish(self) -> None:
        self._run.finish()

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **values})
