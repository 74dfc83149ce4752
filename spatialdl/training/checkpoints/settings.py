"""Checks of checkpoint settings before ranks start, without importing PyTorch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig


def check_settings(trainer: DictConfig) -> None:
    """Check intervals, patience and folders of the group ``trainer``.

    Raises:
        ValueError: names the key.
    """
    numbers = {
        "validate_every": (trainer.validate_every, 1),
        "validate_every_epochs": (trainer.validate_every_epochs, 1),
        "checkpoint.every_steps": (trainer.checkpoint.every_steps, 1),
        "checkpoint.every_epochs": (trainer.checkpoint.every_epochs, 1),
        "early_stopping.patience": (trainer.early_stopping.patience, 1),
        "checkpoint.keep": (trainer.checkpoint.keep, 0),
    }
    needed = ("validate_every_epochs", "early_stopping.patience", "checkpoint.keep")
    units = {"checkpoint.keep": "checkpoints", "early_stopping.patience": "validation"}
    for key, (value, least) in numbers.items():
        if value is None and key not in needed:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            unit = units.get(key, "epoch" if "epoch" in key else "step")
            null = "" if key in needed else ", or null"
            raise ValueError(f"trainer.{key}={value} must be at least {least} {unit}{null}")
    delta = trainer.early_stopping.min_delta
    if not isinstance(delta, int | float) or not delta >= 0:
        raise ValueError(f"trainer.early_stopping.min_delta={delta} must be 0 or above")
    local = trainer.checkpoint.local
    if local not in (None, "auto") and not Path(str(local)).expanduser().is_dir():
        raise ValueError(
            f"trainer.checkpoint.local={local} is not a folder: set one on a local disk, or null"
        )


def local_folder(setting: str | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Folder on a local disk where files are written first; None without one.

    Args:
        setting: a folder, or ``auto`` for the temporary folder of a Slurm job, if any.
        environment: environment variables.
    """
    if setting is None:
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    if "SLURM_JOB_ID" not in environment:
        return None
    folder = environment.get("SLURM_TMPDIR") or environment.get("TMPDIR")
    return Path(folder) if folder and Path(folder).is_dir() else None
