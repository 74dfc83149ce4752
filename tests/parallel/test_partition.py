from __future__ import annotations

import pytest

from spatialdl.parallel.partition import Partition, joined


def test_ranks_have_equal_parts_as_far_as_channels_go():
    partition = Partition.even(7, 3)
    assert partition.pieces == ((0, 2, 4, 7),)
    assert [partition.held(rank) for rank in range(3)] == [((0, 2),), ((2, 4),), ((4, 7),)]
    assert [partition.size_of(rank) for rank in range(3)] == [2, 2, 3]
    assert (partition.size, partition.ranks) == (7, 3)


def test_heads_of_queries_keys_and_values_stay_whole_and_together():
    partition = Partition.even(72, 2, unit=8, pieces=3)
    assert partition.pieces == ((0, 8, 24),) * 3
    assert partition.held(1) == ((8, 24), (32, 48), (56, 72))


def test_a_dim_grows_and_shrinks_with_what_lies_in_an_entry():
    partition = Partition.even(5, 2)
    assert partition.times(49).pieces == ((0, 98, 245),)
    assert partition.times(49).over(49) == partition
    assert Partition.even(24, 2).over(8) is None


def test_parts_of_a_dim_are_whole_pieces():
    both = joined([Partition.even(6, 2), Partition.even(4, 2)])
    assert both.pieces == ((0, 3, 6), (0, 2, 4))
    assert both.part(6, 10) == Partition.even(4, 2)
    assert both.part(0, 10) == both
    assert both.part(0, 4) is None
    assert both.part(3, 10) is None


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_what_ranks_have_is_the_whole_dim_once(ranks: int):
    partition = joined([Partition.even(6, ranks), Partition.even(8, ranks, unit=4)])
    held = [interval for rank in range(ranks) for interval in partition.held(rank)]
    assert sorted(n for start, stop in held for n in range(start, stop)) == list(range(14))
