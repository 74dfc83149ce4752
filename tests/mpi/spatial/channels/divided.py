"""What tests on divided channels share: tensors of which each rank has a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.world import world
from spatialdl.layout.partition import Partition
from spatialdl.spatial.channels import tensor
from spatialdl.spatial.channels.moves import local_part
from spatialdl.spatial.channels.tensor import ChannelTensor, all_channels
from spatialdl.spatial.channels.weights import divide, uses_of, without_data
from tests.mpi.device import DEVICE, REFERENCE

WORLD: Communicator = world()


def drawn(*shape: int, seed: int = 3) -> Tensor:
    """The same on all ranks."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def channels(whole: Tensor, at: int = 1, partition: Partition | None = None) -> ChannelTensor:

    partition = partition or Partition.even(whole.shape[at], WORLD.size)
    own = local_part(whole.detach(), at, partition, WORLD.rank).clone().to(DEVICE)
    own.requires_grad_(whole.requires_grad)
    return ChannelTensor(own, at, partition, WORLD)


def assert_as_whole(
    operation: Callable[..., Tensor],
    *wholes: Tensor,
    at: int = 1,
    partition: Partition | None = None,
) -> Any:
    """An operation on divided tensors gives the numbers and gradients of one on whole ones.

    Returns:
        What it gave.
    """
    references = [x.detach().clone().requires_grad_() for x in wholes]
    # which may be written into, where kernels are those of the parts: hardswish of float64 has a
    # constant of float32 in PyTorch's for CUDA
    expected = operation(*((x * 1).to(REFERENCE) for x in references))
    leaves = [channels(x.requires_grad_(), at, partition) for x in wholes]
    given = operation(*(one.like(one.part * 1) for one in leaves))
    whole = all_channels(given)
    expected = expected.cpu()
    torch.testing.assert_close(whole.detach().cpu(), expected.detach(), rtol=0, atol=1e-12)
    weights = torch.randn(expected.shape, dtype=expected.dtype)
    (expected * weights).sum().backward()
    (whole * weights.to(DEVICE)).sum().backward()
    for one, reference in zip(leaves, references, strict=True):
        assert reference.grad is not None
        wanted = local_part(reference.grad, one.at, one.partition, WORLD.rank)
        torch.testing.assert_close(one.part.grad.cpu(), wanted, rtol=0, atol=1e-12)
    return given


@contextmanager
def no_gathers() -> Iterator[None]:
    """Whatever brings all channels to a rank fails."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"all channels are gathered: {args[0]}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "on_all_channels", refuse)
        patch.setattr(tensor, "gather", refuse)
        yield


def within(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, which is to need all channels nowhere."""

    def run(*args: Tensor) -> Tensor:
        with no_gathers():
            return function(*args)

    return run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.narrow = nn.Conv2d(12, 5, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(5, 1, 1))
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.narrow(F.relu(self.norm(self.wide(x)))) * self.scale
        return self.head(x.mean((2, 3)))


def divided(network: nn.Module, x: Tensor) -> nn.Module:
    divide(network, uses_of(network, WORLD, lambda shadow: shadow(without_data(x))), WORLD)
    return network
