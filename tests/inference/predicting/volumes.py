"""Small NIfTI files, and networks trained on volumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from torch import nn

from spatialdl.data import ShardWriter
from spatialdl.data.importing.volumes import import_volumes
from tests.inference.predicting.runs import train

AFFINE = np.array(
    [[0.69, -0.16, 0.07, -12], [0.14, 0.78, -0.37, 30], [0, 0.12, 2.47, -55], [0, 0, 0, 1.0]]
)
"""Oblique, about 0.7 x 0.8 x 2.5 mm; (column, row, slice) lead to the right, front and top."""

UNET = ("model=unet3d", "++model.depth=1", "++model.width=3")


def pointwise(num_classes: int, in_channels: int) -> nn.Module:
    """A network of single voxels: equal voxels have equal probabilities."""
    return nn.Conv3d(in_channels, num_classes, 1)


def means(num_classes: int, in_channels: int) -> nn.Module:
    """A network that predicts a class per volume."""
    parts = [nn.Conv3d(in_channels, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(4, num_classes))


def of_own(name: str) -> tuple[str, ...]:
    """Overrides of a network of this module."""
    return (f"++model._target_=tests.inference.predicting.volumes.{name}", "~model.width")


def voxels(shape: tuple[int, ...], seed: int = 0) -> Any:
    """int16 voxels as in CT; the one at (0, 0, 0) is the brightest."""
    found = np.random.default_rng(seed).integers(-1000, 1000, shape).astype(np.int16)
    found[0, 0, 0] = 3000
    return found


def save(path: Path, pixels: Any, affine: Any = AFFINE) -> Path:
    """A NIfTI file of (columns, rows, slices[, contrasts])."""
    nibabel.save(nibabel.Nifti1Image(pixels, affine), path)
    return path


def train_on_volumes(folder: Path, *overrides: str, contrasts: int = 1) -> Path:
    """Two steps on imported files of 9 x 8 x 7 with three classes; the run directory."""
    (folder / "in").mkdir(parents=True)
    (folder / "masks").mkdir()
    more = (contrasts,) if contrasts > 1 else ()
    for number in range(4):
        save(folder / "in" / f"v{number}.nii.gz", voxels((9, 8, 7, *more), number))
        mask = np.random.default_rng(number).integers(0, 3, (9, 8, 7)).astype(np.uint8)
        save(folder / "masks" / f"v{number}.nii.gz", mask)
    import_volumes(folder / "in", folder / "set", masks=folder / "masks")
    data = (
        *("data=shards", f"data.path={folder / 'set'}", "data.split=null", "data.num_classes=3"),
        *("data.image_size=[7,8,9]", "data.batch_size=2", "data.scale=1000", "data.mean=0"),
    )
    return train(folder / "run", "task=segmentation", *overrides, data=data)


def train_on_labels(folder: Path, *overrides: str) -> Path:
    """As `train_on_volumes`, for a network that predicts a class or numbers per volume."""
    with ShardWriter(folder / "set", classes=["ill", "well", "new"], kind="volumes") as writer:
        for number in range(4):
            one = voxels((7, 8, 9), number)
            lies = {"spacing": (2.5, 0.8, 0.7), "affine": AFFINE[:3, [2, 1, 0, 3]]}
            writer.add(one, number % 3, "train", slide=f"v{number}", **lies)
    data = (
        *("data=shards", f"data.path={folder / 'set'}", "data.batch_size=2"),
        "data.image_size=[7,8,9]",
    )
    return train(folder / "run", *of_own("means"), *overrides, data=data)
