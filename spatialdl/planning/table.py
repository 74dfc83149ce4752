"""The planner's table, and the limit of memory that a user gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spatialdl.parallel.layout import by
from spatialdl.planning.cluster import Cluster
from spatialdl.planning.job import Job
from spatialdl.planning.search import Row


def limit(given: Any, cluster: Cluster, world: Any) -> float | None:
    """Bytes that a rank may take.

    Raises:
        ValueError: if the numbers make no sense.
    """
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"world={world} must be a whole number of at least 1 rank")
    if given is None:
        return cluster.memory_bytes(world)
    if not isinstance(given, int | float) or given <= 0:
        raise ValueError(f"device_memory_gb={given} must be more than 0")
    return 1e9 * given


def table(rows: Sequence[Row], job: Job, cluster: Cluster, found: int) -> str:
    """A line a layout."""
    lines = [
        f"{type(job.model).__name__}, {job.batch} images of {by(job.image[1:])} a step, on "
        f"{cluster.name}: {len(rows)} of {found} layouts",
        "",
        f"{'GB a rank':>9}{'s a step':>10}{'images/s':>10}{'MB sent':>10}{'waiting':>9}  layout",
    ]
    for row in rows:
        one = row.prediction
        keys = " ".join(row.layout.overrides())
        lines.append(
            f"{row.memory / 1e9:9.2f}{one.seconds:10.4g}{job.batch / one.seconds:10.4g}"
            f"{one.sent / 1e6:10.1f}{one.bubble:9.0%}  {keys}"
        )
    world = rows[0].prediction.placement.world_size
    before = cluster.base_bytes(world)
    if cluster.cores is None:  # on CPUs it is measured
        lines += ["", f"of them {before / 1e9:.2f} GB: context, NCCL, libraries (cluster.base_mb)"]
    if world > 1 and job.uncut:
        lines += ["", f"note: layouts with stages are left out: {job.uncut}"]
    return "\n".join(lines)
