"""What every logger takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Picture = npt.NDArray[np.uint8]
"""(rows, columns, 3), RGB."""


class Logger(Protocol):
    """Takes what happens in a run, on rank 0; may raise anything, and is not asked again then."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """The configuration of the run, nested."""

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of an optimizer step."""

    def log_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of all validation samples after so many steps."""

    def log_image(self, step: int, name: str, picture: Picture) -> None:
        """A picture; those of one name follow each other."""

    def finish(self) -> None:
        """No more will come."""
