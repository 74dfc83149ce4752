"""Parameters and buffers that a forward writes into before the backward that needs them has run.

Several micro-batches are under way at once: the forward of the second one would change what
autograd has saved for the backward of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from spatialdl.spatial.tensor import SpatialTensor


@contextmanager
def copies_saved(state: Sequence[Tensor]) -> Iterator[None]:
    """Let autograd save copies of these tensors, and everything else as it is."""
    if not state or not torch.is_grad_enabled():
        yield
        return
    memories = {_memory(one) for one in state}

    def pack(saved: Tensor) -> Tensor:
        if isinstance(saved, SpatialTensor) or saved.layout != torch.strided:
            return saved
        return saved.detach().clone() if _memory(saved) in memories else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        yield


def _memory(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():  # no operation of the forward, which may be followed
        return tensor.untyped_storage().data_ptr()
