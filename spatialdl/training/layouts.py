"""The ranks that a configuration needs, and whether batches and images can be cut for them.

No PyTorch here: the process that only starts the ranks checks all this before it does.
"""

from __future__ import annotations

from omegaconf import DictConfig, ListConfig

from spatialdl.mesh import Placement
from spatialdl.pipeline.schedule import SCHEDULES

RECOMPUTE = ("none", "block")


def placement_of(parallel: DictConfig) -> Placement:
    """The ranks that a layout needs.

    Raises:
        ValueError: if its numbers contradict each other.
    """
    stages, spatial_stages = _count(parallel, "stages"), _count(parallel, "spatial_stages", 0)
    data = _count(parallel, "data")
    _count(parallel, "microbatches")
    grid = _grid(parallel)
    if spatial_stages > stages:
        raise ValueError(
            f"parallel.spatial_stages={spatial_stages} must lie between 0 and "
            f"parallel.stages={stages}"
        )
    if grid != (1, 1) and spatial_stages == 0:
        raise ValueError(
            f"parallel.grid={list(grid)} cuts images, but parallel={parallel.name} has no spatial "
            "stage: take parallel=sp, sp+lp or sp+pp, or set parallel.spatial_stages"
        )
    if parallel.schedule not in SCHEDULES:
        raise ValueError(
            f"parallel.schedule={parallel.schedule} is unknown: take one of {', '.join(SCHEDULES)}"
        )
    if parallel.recompute not in RECOMPUTE:
        raise ValueError(
            f"parallel.recompute={parallel.recompute} is unknown: take one of "
            f"{', '.join(RECOMPUTE)}"
        )
    return Placement(data, (grid,) * spatial_stages + ((1, 1),) * (stages - spatial_stages))


def _count(parallel: DictConfig, key: str, least: int = 1) -> int:
    value = parallel[key]
    if not isinstance(value, int) or value < least:
        raise ValueError(f"parallel.{key} is a whole number of at least {least}, got {value}")
    return value


def _grid(parallel: DictConfig) -> tuple[int, int]:
    given = list(parallel.grid) if isinstance(parallel.grid, ListConfig) else parallel.grid
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(n, int) for n in given):
        raise ValueError(f"parallel.grid is [rows,columns], got {given}")
    if min(given) < 1:
        raise ValueError(f"parallel.grid={given} needs at least 1 row and 1 column")
    return given[0], given[1]


def check_batch(batch_size: int, microbatches: int, replicas: int) -> None:
    """Refuse a batch that leaves a micro-batch of a replica without samples."""
    if not isinstance(batch_size, int) or batch_size < microbatches * replicas:
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
