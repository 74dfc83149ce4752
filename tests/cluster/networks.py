"""Networks with which something goes wrong, or comes to a stop, in the middle of a run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torch import Tensor, nn

from tests.training.checkpoints.runs import network as tiny


class Fails(nn.Module):
    """Fails in its third forward pass on rank 1 of the job."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "meta":  # recorded, not run
            return x
        self.calls += 1
        if self.calls == 3 and os.environ.get("SLURM_PROCID") == "1":
            if self.how == "raises":
                raise RuntimeError("this rank has had enough")
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def network(num_classes: int = 3, in_channels: int = 3, how: str = "raises") -> nn.Sequential:
    return nn.Sequential(Fails(how), *tiny(num_classes, in_channels))


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
