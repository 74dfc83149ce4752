"""Clipping gradients by their norm over all stages, each parameter counted once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import shard_of


def clip_gradients(
    stages: Mapping[int, nn.Module], holders: Mapping[int, int], comm: Communicator, limit: float
) -> float:
    """Scale all gradients so that their common norm is at most `limit`; all ranks must call it.

    As ``torch.nn.utils.clip_grad_norm_`` does it for a whole network.

    Args:
        stages: by number those of this rank, with averaged gradients.
        holders: how many ranks hold each of them; of sharded ones, each shard.
        comm: all ranks.

    Returns:
        The norm as it was, the same on every rank.
    """
    grads = {
        number: [shard_of(p.grad) for p in stage.parameters() if p.grad is not None]
        for number, stage in stages.items()
    }
    squares = torch.zeros(1, dtype=torch.float64)
    for number, own in grads.items():
        for grad in own:
            norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
            squares += norm.cpu().square() / holders[number]
    norm = float(comm.all_reduce(squares).sqrt())
    factor = limit / (norm + 1e-6)
    if not factor >= 1:  # nor if it is no number
        for own in grads.values():
            for grad in own:
                grad.mul_(factor)
    return norm
