"""What a step of ResNet-50 may take on GPUs, from what is counted: estimates, nothing is measured.

    python -m tests.host_waits.estimate

The planner (`spatialdl.planning`) has the time of computing, of halos and of sums of gradients on a
cluster of the configuration's. To these each host wait adds `WAIT_S`, and a path through the host
the copies over PCIe of all that is sent, as ``python -m tests.host_waits`` counts them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.harness import markdown
from spatialdl.models import resnet50
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.planning.auto import cluster_file
from spatialdl.planning.job import PlannedJob
from spatialdl.planning.predict import predict
from spatialdl.planning.setup import cluster_named

WAIT_S = 20e-6
"""Of a host wait: until the host has noticed, and the device has work again."""

PCIE = 5e10
"""Bytes a second between host and device, of 6.4e10 in each direction of PCIe 5."""

WAITS_BEFORE = 445
"""Of the step that is counted, before the release that has comm.device_path."""

BATCH, TILE, COUNTED_TILE = 4, 1024, 512


class Case(NamedTuple):
    """A grid of tiles of 1,024 x 1,024.

    Attributes:
        edges: of the tile with the most neighbours; the tile that is counted has two.
    """

    grid: tuple[int, int]
    edges: int

    @property
    def ranks(self) -> int:
        return self.grid[0] * self.grid[1]


CASES = (Case((1, 1), 0), Case((2, 2), 2), Case((8, 8), 4))


def main() -> None:
    counted = _counted()
    titles = ["GPUs", "images", "before, host", "host", "nccl", "of one GPU's speed, nccl"]
    rows = [row for name in ("h100", "mi300x") for row in _rows(name, counted)]
    print("\n".join(markdown(["", *titles], rows)))


def _counted() -> dict[str, Any]:
    """Of one of four ranks on images of 1,024 x 1,024, through the host."""
    command = [sys.executable, "-m", "tests.host_waits", "--json", "ResNet-50/sp"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["ResNet-50/sp"]
    return found


def _rows(cluster: str, counted: dict[str, Any]) -> Iterator[list[str]]:
    alone = planned(cluster, CASES[0])
    for case in CASES:
        seconds = planned(cluster, case)
        copies = copied_bytes(case, counted) / PCIE
        waits = (WAITS_BEFORE, int(counted["waits"])) if case.ranks > 1 else (1, 1)
        through_host = (seconds + copies + WAIT_S * number for number in waits)
        by_nccl = seconds + WAIT_S  # for its loss
        side = TILE * case.grid[0]
        times = (f"{1e3 * one:.1f} ms" for one in (*through_host, by_nccl))
        share = f"{alone / seconds:.0%}"
        yield [cluster, str(case.ranks), f"{BATCH} of {side:,} x {side:,}", *times, share]


def planned(cluster: str, case: Case) -> float:
    """Seconds of a step by the planner."""
    shape = (3, TILE * case.grid[0], TILE * case.grid[1])
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    job = PlannedJob(resnet50(num_classes=10), shape, BATCH, optimizer, on_cpu=False)
    placement = Placement(1, (case.grid,))
    schedule = make_schedule("1f1b", placement, 1)
    return predict(job, cluster_named(cluster_file(cluster)), placement, schedule, "none").seconds


def copied_bytes(case: Case, counted: dict[str, Any]) -> float:
    """To the host and back: sums as counted, halos by the length of the tile's edges."""
    if case.ranks == 1:
        return 0.0
    halos = counted["bytes"]["messages"] * case.edges / 2 * TILE / COUNTED_TILE
    return float(2 * (counted["bytes"]["collectives"] + halos))


if __name__ == "__main__":
    main()
