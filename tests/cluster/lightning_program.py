"""A user's Lightning program for two ranks, and the same run in a single process."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger

from spatialdl.training.lightning import SpatialStrategy
from tests.mpi.training.lightning_modules import fitted


def trained(strategy: SpatialStrategy | str, folder: Path) -> L.Trainer:
    """The Trainer after two epochs in float64; losses and the last checkpoint are in `folder`."""
    logger = CSVLogger(str(folder), name=None, version="")
    kept = {"logger": logger, "log_every_n_steps": 1, "enable_checkpointing": True}
    return fitted(strategy, validates=True, **kept)[1]


if __name__ == "__main__":
    trainer = trained(SpatialStrategy(grid=(2, 1)), Path("run"))
    place = f"rank {trainer.local_rank} of node {trainer.node_rank}"
    print(f"rank {trainer.global_rank} of {trainer.world_size} is {place}")
