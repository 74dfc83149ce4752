"""Checks of layouts without PyTorch, before ranks start."""

from __future__ import annotations

from collections.abc import Sequence

from spatialdl.layout.layout import by
from spatialdl.layout.placement import Placement


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


def check_size(size: Sequence[int], grid: Sequence[int]) -> None:
    """Refuse images with fewer pixels along a dim than the grid has parts.

    Raises:
        ValueError: with both.
    """
    if any(extent < parts for extent, parts in zip(size, grid, strict=True)):
        raise ValueError(
            f"an image of {by(size)} is smaller than the grid {by(grid)}: use a smaller grid, or a "
            "larger image"
        )


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
