"""Gradients that were scaled up for float16: scaled back, and looked through for overflows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator


def unscale_gradients(grads: Iterable[Tensor], comm: Communicator, scale: float) -> bool:
    """Divide gradients by `scale`, unless one of them is not finite on any rank.

    All ranks of `comm` must call it, and all get the same answer.

    Args:
        grads: of this rank, averaged; of sharded ones the shards.

    Returns:
        Whether all gradients of all ranks are finite.
    """
    grads = list(grads)
    finite = [grad.isfinite().all() for grad in grads]
    overflows = sum(1 for one in finite if not one)
    if float(comm.all_reduce(torch.tensor([overflows], dtype=torch.float64))) > 0:
        return False
    for grad in grads:
        grad.div_(scale)
    return True
