"""Sums and collections of all kinds of numbers, over whichever transport; and their gradients."""

from __future__ import annotations

import pytest
import torch

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import (
    add_over_ranks_,
    differentiable_gather,
    gather_over_ranks,
    max_over_ranks,
    sum_over_ranks,
)

KINDS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
KINDS += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


def of_rank(rank: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(12).view(3, 4) % (rank + 2)
    return values.to(dtype) * (1 + 2j) ** rank if dtype.is_complex else values.to(dtype)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_all_types_are_added_up(dtype: torch.dtype, world: Communicator) -> None:
    every = torch.stack([of_rank(rank, dtype) for rank in range(world.size)])
    total = every.any(0) if dtype == torch.bool else every.sum(0, dtype=dtype)
    for own in (of_rank(world.rank, dtype), of_rank(world.rank, dtype).T.contiguous().T):
        assert torch.equal(sum_over_ranks(world, own), total)
        assert torch.equal(own, of_rank(world.rank, dtype))
    if dtype in (torch.float32, torch.float64, torch.int64):
        add_over_ranks_(world, own := of_rank(world.rank, dtype))
        assert torch.equal(own, total)


@pytest.mark.parametrize("view", [torch.conj, lambda x: x.conj().imag, lambda x: x.mT, torch.neg])
def test_what_is_seen_through_a_view_is_added_up_and_gathered(view, world: Communicator) -> None:
    every = [view(of_rank(rank, torch.complex128)) for rank in range(world.size)]
    own = view(of_rank(world.rank, torch.complex128))
    assert torch.equal(sum_over_ranks(world, own), sum(every))
    assert torch.equal(gather_over_ranks(world, own), torch.stack(every))


def test_the_largest_is_nan_wherever_a_rank_has_nan(world: Communicator) -> None:
    own = torch.tensor([float(world.rank), -float(world.rank), 3, -torch.inf])
    last = world.size - 1
    if world.rank == last:
        own[2] = torch.nan
    expected = torch.tensor([float(last), 0, torch.nan, -torch.inf])
    found = max_over_ranks(world, own)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_backward_of_a_collection_adds_up_what_all_ranks_make_of_a_part(
    world: Communicator,
) -> None:
    own = torch.tensor([1.0, 2.0], requires_grad=True)
    everybody = differentiable_gather(world, own * (world.rank + 1), "test")
    ranks = torch.arange(1.0, world.size + 1)
    assert torch.equal(everybody.detach(), ranks[:, None] * torch.tensor([1.0, 2.0]))
    factors = (ranks * 10**world.rank)[:, None].expand(-1, 2)
    (everybody * factors).sum().backward()
    tens = sum(10**rank for rank in range(world.size))
    assert own.grad.tolist() == [(world.rank + 1) ** 2 * tens] * 2
