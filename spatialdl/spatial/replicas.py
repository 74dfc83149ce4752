"""BatchNorm over data replicas, with statistics of all ranks that share a micro-batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spatialdl.comm.communicator import Communicator
from spatialdl.spatial.norm import StatisticsOver, in_order_of_torch, train_batch_norm
from spatialdl.spatial.random.composite import inside
from spatialdl.spatial.tensor import SpatialTensor

_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)


class BatchNormOver(TorchFunctionMode):
    """A mode in which BatchNorm in training uses the samples of all ranks of `comm`.

    For split images and plain tensors. All of these ranks must run the same layers in it, in
    forward and, if parts of the network are recomputed, in backward.

    Args:
        comm: of ranks that hold tiles of different images, or different tiles of one.
        parts: number of parts of an image; this many ranks hold equal plain tensors.
    """

    def __init__(self, comm: Communicator, parts: int = 1) -> None:
        super().__init__()
        self._comm, self._parts = comm, parts
        self._around: list[tuple[Communicator | None, int]] = []

    def __enter__(self) -> BatchNormOver:
        self._around.append((StatisticsOver.comm, StatisticsOver.parts))
        StatisticsOver.comm, StatisticsOver.parts = self._comm, self._parts
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        StatisticsOver.comm, StatisticsOver.parts = self._around.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, SpatialTensor) for kind in types):
            return func(*args, **kwargs)
        divided = next((kind for kind in types if hasattr(kind, "holds_channels")), None)
        if divided is not None:
            with self:  # applies to this rank's channels
                return divided.__torch_function__(func, types, args, kwargs)
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func is torch.batch_norm:
            return in_order_of_torch(self._batch_norm)(*args, **kwargs)
        backward = inside(func) if func in _BACKWARDS else None
        if backward is None:
            return func(*args, **kwargs)
        with self:  # PyTorch disables this mode here, but recomputation needs it
            return backward(*args, **kwargs)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, False, momentum, eps
            )
        options = (running_mean, running_var, weight, bias, momentum, eps)
        return train_batch_norm(input, self._comm, None, *options, copies=self._parts)


def repeat_later() -> AbstractContextManager[object]:
    """A context that restores the current setting of BatchNorm when entered later."""
    comm, parts = StatisticsOver.comm, StatisticsOver.parts
    return nullcontext() if comm is None else BatchNormOver(comm, parts)
