"""What the configuration means: ranks, data sets, types; and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig

from spatialdl.data.loader import ImageSource
from spatialdl.data.shards import ShardDataset
from spatialdl.data.synthetic import SyntheticDataset
from spatialdl.mesh import Placement

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def placement_of(parallel: DictConfig) -> Placement:
    """The ranks that a layout needs.

    Raises:
        ValueError: if its numbers contradict each other.
    """
    stages, spatial_stages = int(parallel.stages), int(parallel.spatial_stages)
    grid = tuple(int(parts) for parts in parallel.grid)
    if len(grid) != 2:
        raise ValueError(f"parallel.grid is [rows,columns], got {list(grid)}")
    if not 0 <= spatial_stages <= stages:
        raise ValueError(
            f"parallel.spatial_stages={spatial_stages} must lie between 0 and "
            f"parallel.stages={stages}"
        )
    if grid != (1, 1) and spatial_stages == 0:
        raise ValueError(
            f"parallel.grid={list(grid)} cuts images, but parallel={parallel.name} has no spatial "
            "stage: take parallel=sp, sp+lp or sp+pp, or set parallel.spatial_stages"
        )
    if int(parallel.microbatches) < 1:
        raise ValueError(f"parallel.microbatches={parallel.microbatches} must be at least 1")
    grids = ((grid[0], grid[1]),) * spatial_stages + ((1, 1),) * (stages - spatial_stages)
    return Placement(int(parallel.data), grids)


@dataclass(frozen=True)
class Sources:
    """The data of a run: training, validation (if any), and what the images are like."""

    train: ImageSource
    validation: ImageSource | None
    image_size: tuple[int, int]
    channels: int
    num_classes: int


def open_sources(data: DictConfig, seed: int) -> Sources:
    """Open the data sets that a configuration names.

    Raises:
        ValueError: if there are no labels, or images of different sizes.
        ShardError: if a data set is missing or damaged.
    """
    if data.name == "synthetic":
        return _synthetic(data, seed)
    if data.name != "shards":
        raise ValueError(f"data={data.name} is unknown: take synthetic or shards")
    path = Path(data.path).expanduser()
    train = ShardDataset(path, data.split)
    validation = None
    if data.validation_split is not None and data.validation_split in train.splits:
        validation = ShardDataset(path, data.validation_split)
    for source in (train, validation):
        if source is not None:
            _check_samples(source, path)
    size = train.image_size(0)
    if data.image_size is not None and tuple(data.image_size) != size:
        raise ValueError(
            f"data.image_size={list(data.image_size)}, but the images of {path} are "
            f"{size[0]}x{size[1]}: leave it out, or tile the slides again"
        )
    return Sources(
        train, validation, size, train.channels, int(data.num_classes or len(train.classes))
    )


def _synthetic(data: DictConfig, seed: int) -> Sources:
    size = (int(data.image_size[0]), int(data.image_size[1]))
    classes, channels = int(data.num_classes), int(data.channels)
    train = SyntheticDataset(int(data.samples), size, classes, channels, seed)
    validation = None
    if data.validation_samples:
        held_out = int(data.validation_samples)
        validation = SyntheticDataset(held_out, size, classes, channels, seed + 1)
    return Sources(train, validation, size, channels, classes)


def _check_samples(source: ShardDataset, path: Path) -> None:
    if len(source) == 0:
        raise ValueError(f"the data set {path} has no samples: nothing to train on")
    unlabelled = int((source.labels < 0).sum())
    if unlabelled:
        raise ValueError(
            f"{unlabelled} of {len(source)} samples of {path} have no label: write it again with "
            "--labels, or choose a split with labels by data.split"
        )
    sizes = {source.image_size(sample) for sample in range(len(source))}
    if len(sizes) > 1:
        raise ValueError(
            f"the images of {path} have {len(sizes)} different sizes, such as {sorted(sizes)[:3]}: "
            "one batch needs one size"
        )


def check_batch(batch_size: int, microbatches: int, replicas: int) -> None:
    """Refuse a batch that leaves a micro-batch of a replica without samples."""
    if batch_size < microbatches * replicas:
        raise ValueError(
            f"data.batch_size={batch_size} cannot be cut into parallel.microbatches={microbatches} "
            f"x parallel.data={replicas}: take at least {microbatches * replicas} images a batch"
        )


def check_image(size: tuple[int, int], placement: Placement) -> None:
    """Refuse an image with fewer rows or columns than a grid."""
    for rows, cols in placement.grids:
        if size[0] < rows or size[1] < cols:
            raise ValueError(
                f"an image of {size[0]}x{size[1]} is smaller than the grid {rows}x{cols}: use a "
                "smaller parallel.grid or larger images"
            )


def device_of(name: str) -> torch.device:
    """The device of this rank; which GPU was chosen when the rank started."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device=cuda, but PyTorch sees no GPU here: take device=cpu or auto")
    return torch.device("cuda", torch.cuda.current_device())
