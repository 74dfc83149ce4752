"""TensorBoard logger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch.utils.tensorboard import SummaryWriter

from spatialdl.training.loggers.logger import Picture


class TensorBoard:
    """Event files in the folder ``tensorboard`` of the run directory.

    Args:
        run_dir: run directory.
        done: steps done before the run was resumed; later events are purged.
    """

    def __init__(self, run_dir: Path, done: int) -> None:
        self._writer = SummaryWriter(run_dir / "tensorboard", purge_step=done + 1)

    def log_config(self, config: Mapping[str, Any]) -> None:
        text = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
        self._add("text", "config", f"```yaml\n{text}```", 0)

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._add("scalar", f"train/{name}", value, step)

    def log_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._add("scalar", f"validation/{name}", value, step)
        self._writer.flush()

    def log_image(self, step: int, name: str, picture: Picture) -> None:
        self._add("image", name, picture, step, dataformats="HWC")

    def finish(self) -> None:
        self._writer.close()

    def _add(self, kind: str, *args: Any, **kwargs: Any) -> None:
        getattr(self._writer, f"add_{kind}")(*args, **kwargs)
