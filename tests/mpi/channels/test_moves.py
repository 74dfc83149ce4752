from __future__ import annotations

import pytest
import torch

from spatialdl.channels.moves import (
    all_gather,
    divided,
    gathered,
    own_part,
    reduce_scatter,
    replicated,
    summed,
    summed_and_divided,
)
from spatialdl.comm.reduce import sum_over_ranks
from spatialdl.parallel.partition import Partition, joined
from tests.mpi.channels.divided import WORLD
from tests.mpi.device import DEVICE

RANKS = WORLD.size
PARTITIONS = {
    "even": Partition.even(7, RANKS),
    "heads": Partition.even(3 * 4 * RANKS, RANKS, unit=2, pieces=3),
    "joined": joined([Partition.even(5, RANKS), Partition.even(3, RANKS)]),
    "fewer than ranks": Partition.even(1, RANKS),
}


def drawn(*shape: int, alike: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0 if alike else 1 + WORLD.rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(DEVICE)


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize(("at", "channels_last"), [(0, False), (1, True), (2, False), (2, True)])
def test_what_is_divided_is_gathered_again(name: str, at: int, channels_last: bool):
    partition = PARTITIONS[name]
    shape = [2, 3, 5, 4]
    shape[at] = partition.size
    whole = drawn(*shape)
    if channels_last:
        whole = whole.to(memory_format=torch.channels_last)
    part = own_part(whole, at, partition, WORLD.rank)
    assert torch.equal(all_gather(part, at, partition, WORLD), whole)
    total = reduce_scatter(whole, at, partition, WORLD)
    torch.testing.assert_close(total, part * RANKS, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PARTITIONS)
def test_moves_are_the_adjoints_of_each_other(name: str):
    """<gather x, y> summed over ranks is <x, reduce_scatter y> summed over ranks."""
    partition = PARTITIONS[name]
    part = drawn(3, partition.size_of(WORLD.rank), 2, alike=False)
    other = drawn(3, partition.size, 2, alike=False)
    one = (all_gather(part, 1, partition, WORLD) * other).sum()
    two = (part * reduce_scatter(other, 1, partition, WORLD)).sum()
    sums = sum_over_ranks(WORLD, torch.stack([one, two]))
    torch.testing.assert_close(sums[0], sums[1], rtol=0, atol=1e-12)


def test_gradients_of_what_all_ranks_compute_alike_are_not_summed():
    partition = Partition.even(5, RANKS)
    whole, weights = drawn(2, 5), drawn(2, 5) + 1
    part = own_part(whole, 1, partition, WORLD.rank).clone().requires_grad_()
    (gathered(part, 1, partition, WORLD, alike=True) * weights).sum().backward()
    torch.testing.assert_close(part.grad, own_part(weights, 1, partition, WORLD.rank))
    part.grad = None
    own = weights * (WORLD.rank + 1)
    (gathered(part, 1, partition, WORLD, alike=False) * own).sum().backward()
    factor = RANKS * (RANKS + 1) // 2
    wanted = own_part(weights, 1, partition, WORLD.rank) * factor
    torch.testing.assert_close(part.grad, wanted, rtol=0, atol=1e-12)


def test_gradients_of_parts_are_those_of_the_whole():
    partition = Partition.even(5, RANKS)
    whole = drawn(2, 5).requires_grad_()
    part = divided(whole, 1, partition, WORLD)
    (part * (WORLD.rank + 1)).sum().backward()
    assert whole.grad is not None
    wanted = [rank + 1.0 for rank in range(RANKS) for _ in range(partition.size_of(rank))]
    assert whole.grad.tolist() == [wanted] * 2


def test_partial_sums_are_added_up_once():
    partition = Partition.even(5, RANKS)
    own = drawn(2, 5, alike=False)
    everywhere = sum_over_ranks(WORLD, own)
    for total in (
        summed(own, WORLD),
        all_gather(summed_and_divided(own, 1, partition, WORLD), 1, partition, WORLD),
    ):
        torch.testing.assert_close(total, everywhere, rtol=0, atol=1e-12)
    leaf = own.clone().requires_grad_()
    summed(leaf, WORLD).sum().backward()
    assert leaf.grad is not None
    assert bool((leaf.grad == 1).all())
    whole = drawn(3).requires_grad_()
    (replicated(whole, WORLD) * (WORLD.rank + 1)).sum().backward()
    assert whole.grad is not None
    assert whole.grad.tolist() == [RANKS * (RANKS + 1) / 2] * 3
