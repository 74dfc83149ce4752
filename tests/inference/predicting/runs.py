"""Small trained networks, small slides, and their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from omegaconf import DictConfig, OmegaConf

from spatialdl.comm.single_process import SingleProcess
from spatialdl.inference.predicting.trained import Trained
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.fitting import fit

NETWORK = ["++model._target_=tests.mpi.training.small.small", "~model.width"]
MAPS = ["model=unet", "++model.depth=2", "++model.width=3"]


SYNTHETIC = (
    *("data.image_size=[32,32]", "data.num_classes=3", "data.batch_size=4"),
    *("data.samples=8", "data.validation_samples=0"),
)


def train(run_dir: Path, *overrides: str, data: Sequence[str] = SYNTHETIC) -> Path:
    """Trains two steps in float64 in this process; returns the run directory."""
    fixed = ("trainer.precision=float64", "device=cpu", "optimizer.lr=0.1", "trainer.max_steps=2")
    config = composed("train", *fixed, *data, *overrides)
    fit(Trainer(config, SingleProcess()), run_dir)
    return run_dir


def command(*overrides: str) -> DictConfig:
    """The configuration of the command."""
    return composed("predict", "device=cpu", "trust=[tests]", *overrides)


def picture(rows: int, cols: int, seed: int = 0) -> Any:
    """Coloured spots on glass, uint8 (rows, cols, 3), with tissue except at the border."""
    rng = np.random.default_rng(seed)
    image = rng.integers(60, 200, (rows, cols, 3), np.uint8)
    image[..., 1] //= 2
    image[: rows // 9], image[:, : cols // 11] = 245, 245
    return image


def write_slide(path: Path, rows: int, cols: int, seed: int = 0) -> Path:
    """A tiled TIFF of one level, without resolution."""
    tifffile.imwrite(path, picture(rows, cols, seed), tile=(64, 64), photometric="rgb")
    return path


def known_network(classes: Sequence[str], task: str = "classification", **more: Any) -> Trained:
    """Metadata of a network trained on images of 32 x 32."""
    data = {"image_size": [32, 32], "channels": 3, "num_classes": len(classes), "background": None}
    config = OmegaConf.create({"task": {"name": task}, "data": data})
    return Trained(Path("run"), 2, "digest", config, tuple(classes), **more)
