"""Checks which layouts shard their state or are compiled, without PyTorch, before ranks start."""

from __future__ import annotations

from spatialdl.parallel.placement import Placement

LEAST_TIMEOUT_S = 600
"""Minimum ``comm.timeout``, as ranks wait while one compiles."""


def check_shardable(placement: Placement) -> None:
    """Refuse layouts that sharding over FSDP2 does not support.

    Raises:
        ValueError: with the incompatible setting.
    """
    reasons = {
        "parallel.data=1, as state is sharded over replicas: set parallel.data": (
            placement.data == 1
        ),
        "GEMS, whose two copies of a stage are on different ranks: take parallel=dp+pp": (
            placement.mirrored
        ),
        f"parallel.interleave={placement.interleave}: take one stage per rank": (
            placement.interleave > 1
        ),
        f"parallel.local_dp={placement.most_batch_parts}, which may leave a rank without "
        "samples: leave it out": placement.most_batch_parts > 1,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"parallel.shard_state=true cannot be combined with {reason}")


def check_samples(samples: int, microbatches: int, replicas: int, what: str) -> None:
    """Refuse a batch that leaves a replica without samples in a micro-batch.

    FSDP2 gathers weights for every micro-batch, which needs every replica.

    Args:
        samples: in the batch.
        what: name of the batch in the message.

    Raises:
        ValueError: with the arithmetic.
    """
    if samples // microbatches < replicas:
        raise ValueError(
            f"parallel.shard_state=true needs samples for every replica in every micro-batch, but "
            f"{what} has {samples} for parallel.microbatches={microbatches} x "
            f"parallel.data={replicas}: choose data.batch_size so that at least "
            f"{microbatches * replicas} or none remain, or fewer micro-batches"
        )


def check_compilable(
    placement: Placement,
    recompute: str,
    shard_state: bool,
    timeout: float | None = None,
    deterministic: bool = False,
) -> None:
    """Refuse layouts and settings that cannot be compiled, or whose results would change.

    Args:
        timeout: ``comm.timeout``, seconds.
        deterministic: whether runs must be bitwise reproducible.

    Raises:
        ValueError: with the incompatible setting.
    """
    grid = next((list(grid) for grid in placement.grids if max(grid) > 1), None)
    reasons = {
        f"parallel.grid={grid}, as operations on split images communicate: take parallel=lp, pp, "
        "dp, gems or none": grid is not None,
        f"parallel.local_dp={placement.most_batch_parts}, as stages that divide samples "
        "communicate: take parallel.data": placement.most_batch_parts > 1,
        f"parallel.tensor={placement.most_tensor_parts}, as layers with divided channels "
        "communicate: take parallel.data": placement.most_tensor_parts > 1,
        f"parallel.recompute={recompute}, as recomputed blocks are not compiled: leave one of "
        "them out": recompute != "none",
        "parallel.shard_state=true, as FSDP2 gathers weights by hooks: leave one of them out": (
            shard_state
        ),
        "trainer.deterministic=true, as the first step after a resume is not compiled and rounds "
        "differently: leave one of them out": deterministic,
        f"comm.timeout={timeout or 0:g}, as ranks wait while one compiles: take at least "
        f"{LEAST_TIMEOUT_S} seconds, or null": 0 < (timeout or 0) < LEAST_TIMEOUT_S,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"trainer.compile=true cannot be combined with {reason}")
