"""Checks which layouts can be compiled, without PyTorch, for commands before ranks start."""

from __future__ import annotations

from spatialdl.parallel.placement import Placement

LEAST_TIMEOUT_S = 600
"""Minimum ``comm.timeout``, as ranks wait while one compiles."""


def check_compilable(placement: Placement, recompute: str, shard_state: bool) -> None:
    """Refuse layouts that cannot be compiled, or whose results would change.

    Raises:
        ValueError: with the incompatible setting.
    """
    grid = next((grid for grid in placement.grids if max(grid) > 1), None)
    if grid is not None:
        raise _refused(
            f"parallel.grid={list(grid)}",
            "operations on split images communicate",
            "take parallel=lp, pp, dp, gems or none",
        )
    if placement.most_batch_parts > 1:
        local = f"parallel.local_dp={max(placement.batch)}"
        raise _refused(local, "stages that divide samples communicate", "take parallel.data")
    if placement.most_tensor_parts > 1:
        raise _refused(
            f"parallel.tensor={max(placement.tensor)}",
            "layers with divided channels communicate",
            "take parallel.data",
        )
    if recompute != "none":
        raise _refused(
            f"parallel.recompute={recompute}",
            "recomputed blocks are not compiled",
            "leave one of them out",
        )
    if shard_state:
        raise _refused(
            "parallel.shard_state=true", "FSDP2 gathers weights by hooks", "leave one of them out"
        )


def check_run(timeout: float | None, deterministic: bool) -> None:
    """Refuse settings of a run that compilation would break.

    Args:
        timeout: ``comm.timeout``, seconds.
        deterministic: whether runs must be bitwise reproducible.

    Raises:
        ValueError: if compilation may exceed the timeout, or bits would differ after a resume.
    """
    if deterministic:
        raise _refused(
            "trainer.deterministic=true",
            "the first step after a resume is not compiled and rounds differently",
            "leave one of them out",
        )
    if timeout and timeout < LEAST_TIMEOUT_S:
        raise _refused(
            f"comm.timeout={timeout:g}",
            "ranks wait while one compiles",
            f"take at least {LEAST_TIMEOUT_S} seconds, or null",
        )


def _refused(setting: str, reason: str, remedy: str) -> ValueError:
    return ValueError(
        f"trainer.compile=true cannot be combined with {setting}, as {reason}: {remedy}"
    )
