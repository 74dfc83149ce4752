"""Broadcast of the weights and buffers of one rank."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import shard_of

PORTION_BYTES = 64 * 2**20


@torch.no_grad()
def broadcast_state(module: nn.Module, comm: Communicator) -> None:
    """Overwrite all parameters and buffers with those of rank 0; collective.

    Raises:
        ValueError: on all ranks, if networks differ in names, shapes or dtypes, or a parameter is
            not initialised.
    """
    named = dict([*module.named_parameters(), *module.named_buffers()])
    for name, tensor in named.items():
        if is_lazy(tensor):
            raise ValueError(
                f"{name} of {type(module).__name__} is not initialised: run the network once on an "
                "image on every rank before wrapping it"
            )
    if comm.size == 1:
        return
    own = {name: f"{t.dtype} {tuple(t.shape)}" for name, t in named.items()}
    for rank, other in enumerate(comm.allgather(own)):
        _compare(own, other, comm.rank, rank)
    for tensor in named.values():
        _broadcast(shard_of(tensor), comm)


def _compare(own: dict[str, str], other: dict[str, str], rank: int, other_rank: int) -> None:
    for name in {**own, **other}:
        if own.get(name) != other.get(name):
            raise ValueError(
                f"networks differ between ranks: {name} is {own.get(name, 'missing')} on rank "
                f"{rank}, {other.get(name, 'missing')} on rank {other_rank}: build the same "
                "network on every rank"
            )


def _broadcast(tensor: torch.Tensor, comm: Communicator) -> None:
    flat = tensor.detach().reshape(-1)
    portion = max(1, PORTION_BYTES // tensor.element_size())
    parts = [
        comm.bcast(part.cpu().clone() if comm.rank == 0 else None)
        for part in torch.split(flat, portion)
    ]
    if comm.rank != 0 and parts:
        tensor.copy_(torch.cat(parts).view(tensor.shape))
