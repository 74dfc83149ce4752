"""Averaging gradients over ranks.

The objective is the mean over the ranks of each rank's loss. Backward works out the gradient of
their sum (the backward of an all-reduce is an all-reduce), so the average over the ranks is right
for spatial and data parallelism alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import add_over_ranks_, sum_over_ranks

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

BUCKET_BYTES = 2**20
"""Smaller gradients travel together, in a copy; larger ones alone, from where they lie."""


def average(parameters: Iterable[nn.Parameter], comm: Communicator, copies: int) -> None:
    """Average the gradients of parameters, the same on every rank of `comm`; all must call it.

    A parameter without a gradient on every rank keeps none; without one on some ranks only, it
    counts as zero there. Of DTensors the shards are averaged; all these ranks hold the same ones.

    Args:
        copies: whose gradients are added up; a rank may hold those of more than one.
    """
    if copies == 1:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    present = torch.tensor([parameter.grad is not None for parameter in trained])
    anywhere = sum_over_ranks(comm, present.to(torch.int32), "gradients present")
    used = [parameter for parameter, count in zip(trained, anywhere, strict=True) if count > 0]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [shard_of(parameter.grad.detach()) for parameter in used if parameter.grad is not None]
    small = [grad for grad in grads if grad.nbytes < BUCKET_BYTES]
    for grad in grads:
        if grad.nbytes >= BUCKET_BYTES:
            add_over_ranks_(comm, grad, "average_gradients")
            grad.div_(copies)
    for bucket in buckets(small, BUCKET_BYTES):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        add_over_ranks_(comm, flat, "average_gradients")
        parts = torch.split(flat.div_(copies), [grad.numel() for grad in bucket])
        for grad, part in zip(bucket, parts, strict=True):
            grad.copy_(part.view_as(grad))


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, where it lies; other tensors as they are."""
    dtensors = sys.modules.get("torch.distributed.tensor")  # slow to import, and seldom needed
    if dtensors is None or not isinstance(tensor, dtensors.DTensor):
        return tensor
    local: Tensor = tensor.to_local()
    return local


def buckets(tensors: Iterable[AnyTensor], limit: int) -> list[list[AnyTensor]]:
    """Tensors of one type and device, in order, in portions of about `limit` bytes."""
    found: list[list[AnyTensor]] = []
    size = 0
    for tensor in tensors:
        last = found[-1][0] if found else None
        alike = last is not None and (last.dtype, last.device) == (tensor.dtype, tensor.device)
        if not alike or size >= limit:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += tensor.numel() * tensor.element_size()
    return found
