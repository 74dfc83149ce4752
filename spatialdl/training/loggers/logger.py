"""Interface of loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Picture = npt.NDArray[np.uint8]
"""RGB pixels, (rows, columns, 3)."""


class Logger(Protocol):
    """Logger of a run on rank 0; after any exception it is not called again."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the nested configuration of the run."""

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log values of an optimizer step."""

    def log_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a validation after `step` steps."""

    def log_image(self, step: int, name: str, picture: Picture) -> None:
        """Log a picture; pictures of one name form a series."""

    def finish(self) -> None:
        """Close the logger."""
