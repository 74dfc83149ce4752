"""Estimates what a step of ResNet-50 may take on GPUs; nothing is measured.

    python -m benchmarks.step_time

The planner (`spatialdl.planning`) has the time of computing, of halos and of sums of gradients on a
cluster of the configuration's. To these each host wait adds `WAIT_S`, and a path through the host
the copies over PCIe of all that is sent. Waits and bytes are those of one of four ranks, 2 x 2
tiles of 512 x 512, that tests/mpi/pipeline/test_host_waits.py counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

import torch

from benchmarks.harness import markdown
from spatialdl.layout.placement import Placement
from spatialdl.models import resnet50
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.planning.job import PlannedJob
from spatialdl.planning.predict import predict
from spatialdl.planning.setup import cluster_file, cluster_named

WAIT_S = 20e-6
"""Of a host wait: until the host has noticed, and the device has work again."""

PCIE = 5e10
"""Bytes a second between host and device, of 6.4e10 in each direction of PCIe 5."""

WAITS, WAITS_BEFORE = 175, 445
"""On the path host, now and before the release that has comm.device_path."""

SUMS, HALOS = 95.0e6, 9.2e6
"""Bytes of reductions, and of halos of the two edges of 512 pixels of a tile."""

BATCH, TILE, COUNTED_TILE = 4, 1024, 512
EDGES = {(1, 1): 0, (2, 2): 2, (8, 8): 4}
"""By the grid of tiles of 1,024 x 1,024: edges of the tile with the most neighbours."""


def rows(cluster: str) -> Iterator[list[str]]:
    """Of a table: milliseconds of a step on each grid."""
    alone = planned(cluster, (1, 1))
    for grid, edges in EDGES.items():
        seconds, is_alone = planned(cluster, grid), edges == 0
        copied = 0.0 if is_alone else 2 * (SUMS + HALOS * edges / 2 * TILE / COUNTED_TILE)
        waits = (1, 1) if is_alone else (WAITS_BEFORE, WAITS)
        through_host = (seconds + copied / PCIE + WAIT_S * number for number in waits)
        by_nccl = seconds + WAIT_S  # for its loss
        side = f"{TILE * grid[0]:,}"
        times = (f"{1e3 * one:.1f} ms" for one in (*through_host, by_nccl))
        images = f"{BATCH} of {side} x {side}"
        yield [cluster, str(prod(grid)), images, *times, f"{alone / seconds:.0%}"]


def planned(cluster: str, grid: tuple[int, int]) -> float:
    """Seconds of a step by the planner."""
    shape = (3, TILE * grid[0], TILE * grid[1])
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    job = PlannedJob(resnet50(num_classes=10), shape, BATCH, optimizer, on_cpu=False)
    placement = Placement(1, (grid,))
    schedule = make_schedule("1f1b", placement, 1)
    return predict(job, cluster_named(cluster_file(cluster)), placement, schedule, "none").seconds


if __name__ == "__main__":
    titles = ["GPUs", "images", "before, host", "host", "nccl", "of one GPU's speed, nccl"]
    table = [row for name in ("h100", "mi300x") for row in rows(name)]
    print("\n".join(markdown(["", *titles], table)))
