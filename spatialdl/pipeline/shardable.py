"""Which layouts can shard their state; no PyTorch here, as it is asked before ranks start."""

from __future__ import annotations

from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.action import Schedule


def check_shardable(placement: Placement, schedule: Schedule) -> None:
    """Refuse what FSDP2 cannot do, or what we have not taught it.

    Raises:
        ValueError: naming what stands in the way.
    """
    kinds = {action.kind for actions in schedule.train for action in actions}
    reasons = {
        "parallel.data=1, and the replicas are what state is sharded over: set parallel.data": (
            placement.data == 1
        ),
        "GEMS, whose two copies of a stage lie on different ranks: take parallel=dp+pp": (
            placement.mirrored
        ),
        f"parallel.interleave={placement.interleave}: take one stage a rank": (
            placement.interleave > 1
        ),
        "parallel.schedule=zero_bubble, where gradients of weights come late: take 1f1b": (
            "weight" in kinds
        ),
        f"parallel.tensor={placement.most_tensor_parts}, which divides parameters, too: take one "
        "of the two": placement.most_tensor_parts > 1,
        f"parallel.local_dp={placement.most_batch_parts}, which may leave a rank without "
        "samples: leave it out": placement.most_batch_parts > 1,
    }
    for reason, stands in reasons.items():
        if stands:
            raise ValueError(f"parallel.shard_state=true does not go with {reason}")


def check_samples(samples: int, microbatches: int, replicas: int, what: str) -> None:
    """Refuse a batch that leaves a replica without samples in a micro-batch.

    FSDP2 gathers weights for every micro-batch, and needs every replica for that.

    Args:
        samples: of the batch.
        what: the batch is called in the message.

    Raises:
        ValueError: with the arithmetic.
    """
    if samples // microbatches < replicas:
        raise ValueError(
            f"parallel.shard_state=true needs samples for every replica in every micro-batch, but "
            f"{what} has {samples} for parallel.microbatches={microbatches} x "
            f"parallel.data={replicas}: choose data.batch_size so that at least "
            f"{microbatches * replicas} or none are left, or fewer micro-batches"
        )
