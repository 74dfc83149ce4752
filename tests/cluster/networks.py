"""A network that comes to a stop in the middle of a run."""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor, nn

from tests.training.checkpoints.runs import network as tiny


class Waits(nn.Module):
    """Waits in its 15th forward pass until there is a file."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file, self.calls = Path(file), 0

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "meta":  # recorded, not run
            return x
        self.calls += 1
        while self.calls == 15 and not self.file.exists():
            time.sleep(0.1)
        return x


def waiting(file: str, num_classes: int = 3, in_channels: int = 3) -> nn.Sequential:
    return nn.Sequential(Waits(file), *tiny(num_classes, in_channels))
