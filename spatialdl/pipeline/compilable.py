"""Which layouts can be compiled. No PyTorch here, so that a command can refuse others first."""

from __future__ import annotations

from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.action import Schedule

LEAST_TIMEOUT_S = 600
"""Other ranks wait while one compiles."""


def check_compilable(
    placement: Placement, schedule: Schedule, recompute: str, shard_state: bool
) -> None:
    """Refuse to compile what would not be one process's numbers, or cannot be compiled.

    Raises:
        ValueError: naming the setting that does not go with it.
    """
    grid = next((grid for grid in placement.grids if max(grid) > 1), None)
    if grid is not None:
        raise _refused(
            f"parallel.grid={list(grid)}",
            "the operations of split images talk to other ranks",
            "take parallel=lp, pp, dp, gems or none",
        )
    if placement.most_batch_parts > 1:
        local = f"parallel.local_dp={max(placement.batch)}"
        raise _refused(
            local, "stages that divide samples talk to other ranks", "take parallel.data"
        )
    if placement.most_tensor_parts > 1:
        raise _refused(
            f"parallel.tensor={max(placement.tensor)}",
            "layers whose channels are divided talk to other ranks",
            "take parallel.data",
        )
    if recompute != "none":
        raise _refused(
            f"parallel.recompute={recompute}",
            "what runs again in backward is not compiled",
            "leave one of them out",
        )
    if shard_state:
        raise _refused(
            "parallel.shard_state=true", "FSDP2 gathers weights by hooks", "leave one of them out"
        )
    if any(one.kind == "weight" for actions in schedule.train for one in actions):
        raise _refused(
            "parallel.schedule=zero_bubble",
            "compiled backwards give the gradients of weights at once",
            "take gpipe, 1f1b or interleaved",
        )


def check_run(timeout: float | None, deterministic: bool) -> None:
    """Refuse settings of a run that compiling would break.

    Args:
        timeout: ``comm.timeout``, seconds.
        deterministic: whether all runs are to give the same bits.

    Raises:
        ValueError: if compiling may take longer, or bits would differ where a run resumes.
    """
    if deterministic:
        raise _refused(
            "trainer.deterministic=true",
            "the first step of a run that resumes is not compiled and rounds otherwise",
            "leave one of them out",
        )
    if timeout and timeout < LEAST_TIMEOUT_S:
        raise _refused(
            f"comm.timeout={timeout:g}",
            "ranks wait while another one compiles",
            f"take at least {LEAST_TIMEOUT_S} seconds, or null",
        )


def _refused(setting: str, reason: str, remedy: str) -> ValueError:
    return ValueError(f"trainer.compile=true does not go with {setting}, as {reason}: {remedy}")
