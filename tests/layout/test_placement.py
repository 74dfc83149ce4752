from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.layout.layout import Layout
from spatialdl.layout.partition import Partition, joined
from spatialdl.layout.placement import Axes, Placement, Position

grids = st.tuples(st.integers(1, 3), st.integers(1, 3))
placements = st.builds(
    Placement, st.integers(1, 4), st.lists(grids, min_size=1, max_size=4).map(tuple)
)


@given(placements)
def test_position_and_ranks_are_inverse_and_take_every_rank_once(placement):
    seen = []
    for replica in range(placement.data):
        for stage in range(placement.stages):
            ranks = placement.ranks(stage, replica)
            assert len(ranks) == placement.widths[stage]
            for part, rank in enumerate(ranks):
                assert placement.positions(rank) == [Position(replica, stage, part)]
            seen += ranks
    assert seen == list(range(placement.world_size))


def test_several_stages_are_dealt_out_to_ranks_in_turn():
    placement = Placement(2, ((2, 1), (1, 1)) * 3, interleave=3)
    assert (placement.groups, placement.world_size) == (2, 6)
    assert placement.positions(4) == [Position(1, stage, 1) for stage in (0, 2, 4)]
    assert placement.positions(2) == [Position(0, stage, 0) for stage in (1, 3, 5)]
    assert placement.describe() == "2 replicas x (2x1 + 1x1) with 3 stages each = 6 ranks"


def test_the_second_copy_lies_in_inverse_order():
    """Stages of different widths: ranks in the middle hold parts of one stage for both copies."""
    placement = Placement(1, ((2, 2), (1, 1)), mirrored=True)
    assert [list(placement.ranks(stage, 0, 1)) for stage in (0, 1)] == [[4, 3, 2, 1], [0]]
    assert placement.positions(0) == [Position(0, 0, 0), Position(0, 1, 0, copy=1)]
    assert placement.positions(3) == [Position(0, 0, 3), Position(0, 0, 1, copy=1)]
    assert placement.describe() == "1 replica x (2x2 + 1x1) and again in reverse order = 5 ranks"


def test_later_stages_may_divide_samples():
    placement = Placement(2, ((2, 1), (1, 1)), batch=(1, 3))
    assert placement.describe() == "2 replicas x (2x1 + 3 by samples) = 10 ranks"
    assert placement.widths == (2, 3)
    assert list(placement.ranks(1, 1)) == [7, 8, 9]
    assert placement.positions(9) == [Position(1, 1, 2)]


def test_an_order_puts_ranks_at_places():
    placement = Placement(2, ((2, 1), (1, 1)), order=(0, 2, 4, 1, 3, 5))
    assert [list(placement.ranks(stage, 1)) for stage in (0, 1)] == [[1, 3], [5]]
    assert placement.positions(4) == [Position(0, 1, 0)]
    assert placement.positions(3) == [Position(1, 0, 1)]
    assert [placement.place(rank) for rank in placement.at(range(6))] == list(range(6))
    assert placement.ranks_by_place == [0, 2, 4, 1, 3, 5]
    assert placement.replica_ranks(1) == [1, 3, 5]
    mirrored = Placement(1, ((2, 2), (1, 1)), mirrored=True, order=(4, 0, 1, 2, 3))
    assert [list(mirrored.ranks(stage, 0, 1)) for stage in (0, 1)] == [[3, 2, 1, 0], [4]]


@pytest.mark.parametrize(
    ("size", "fits"),
    [
        (6, "set parallel.data=2"),
        (4, "set parallel.data=1 on 3 ranks"),
        (8, "set parallel.data=2 on 6 ranks"),
        (2, "use a smaller layout: a replica of this one has 3 ranks"),
    ],
)
def test_another_world_is_refused_with_the_product_and_what_fits(size, fits):
    placement = Placement(1, ((2, 1), (1, 1)))
    placement.check_world(3, "parallel=sp+pp")
    with pytest.raises(ValueError, match="needs") as error:
        placement.check_world(size, "parallel=sp+pp")
    assert str(error.value) == (
        f"parallel=sp+pp needs 1 replica x (2x1 + 1x1) = 3 ranks, but this world has {size} ranks: "
        f"start it with `mpiexec -n 3`, or {fits}"
    )
    with pytest.raises(ValueError, match="needs data 2 x rows 2 x columns 1 = 4 ranks, but"):
        Placement(2, ((2, 1),)).check_world(3, "parallel=dp+sp")


def test_ranks_that_divide_channels_are_neighbours() -> None:
    placement = Placement(2, ((2, 1),), tensor=(2,))
    assert placement.world_size == 8
    assert placement.positions(5) == [Position(1, 0, 0, 0, 1)]
    assert list(placement.ranks(0, 1, tensor=1)) == [5, 7]
    assert list(placement.tensor_ranks(Position(1, 0, 1, 0, 0))) == [6, 7]
    assert placement.describe() == "2 replicas x 2x1 x 2 by channels = 8 ranks"


def test_copies_in_inverse_order_divide_channels_over_the_same_ranks() -> None:
    placement = Placement(1, ((1, 1), (1, 1)), mirrored=True, tensor=(2, 2))
    first, second = placement.positions(1)
    assert (first.stage, first.tensor, second.stage, second.tensor) == (0, 1, 1, 1)
    assert list(placement.tensor_ranks(first)) == list(placement.tensor_ranks(second)) == [0, 1]
    assert list(placement.ranks(1, 0, 1, tensor=1)) == [1]


def test_a_stage_shared_by_both_copies_has_one_part_of_the_channels() -> None:
    placement = Placement(1, ((2, 1),) * 3, mirrored=True, tensor=(3,) * 3)
    for rank in placement.stage_ranks(1, 0):
        assert len({one.tensor for one in placement.positions(rank) if one.stage == 1}) == 1


def test_stages_divide_channels_over_ranks_of_their_own() -> None:
    placement = Placement(1, ((2, 1), (1, 1)), tensor=(1, 4))
    assert placement.widths == (2, 4)
    assert placement.positions(4) == [Position(0, 1, 0, 0, 2)]
    assert list(placement.ranks(1, 0, tensor=2)) == [4]
    assert placement.describe() == "1 replica x (2x1 + 4 by channels) = 6 ranks"
    assert [placement.axes(stage).tensor for stage in (0, 1)] == [1, 4]
    assert [placement.axes(stage).spatial for stage in (0, 1)] == [(2, 1), (1, 1)]


def test_ranks_may_cut_their_parts_into_virtual_tiles():
    placement = Placement(2, ((2, 1), (1, 2)), stream=(2, 3))
    plain = Placement(2, ((2, 1), (1, 2)))
    assert placement.tile_grids == ((4, 3), (2, 6))
    assert plain.tile_grids == plain.grids
    assert (placement.world_size, placement.widths) == (plain.world_size, plain.widths)
    assert [placement.positions(rank) for rank in range(8)] == [
        plain.positions(rank) for rank in range(8)
    ]
    assert placement.describe() == plain.describe()


def test_ranks_are_cut_where_their_virtual_tiles_are():
    """Which is not always where ranks without any are cut."""
    size = (10, 7)
    plain, placement = (Placement(1, ((3, 1),), stream=stream) for stream in ((), (2, 1)))
    assert plain.layout(0, 5, size) == Layout.even(5, size, (3, 1))
    found = placement.layout(0, 5, size)
    assert (found.samples, found.grid) == (5, (3, 1))
    assert found.cuts[0] == Layout.even(5, size, (6, 1)).cuts[0][::2] == (0, 3, 6, 10)
    narrow = Placement(1, ((2, 1),), stream=(3, 1)).layout(0, 1, (7, 7))
    assert narrow.cuts == ((0, 3, 7), (0, 7))


ONE, TWO = (1, 1), (2, 1)
ORDER, PER_STAGE = "order must be a permutation of 3 ranks", "must have one number for each of 2 st"
SHARED = "^stages that share ranks must"
CHANNELS = rf"{SHARED} divide channels over equally many ranks, got tensor=\[1, 2"


@pytest.mark.parametrize(
    ("sentence", "make"),
    [
        ("columns axis of a mesh needs at least 1 rank, got 0", lambda: Axes(spatial=(2, 0))),
        ("rows axis of a mesh needs at least 1 rank, got '2'", lambda: Axes(spatial=("2", 1))),
        (r"a grid has one to three numbers, .* got \(\)", lambda: Axes(spatial=())),
        ("images or samples, got data 1 x rows 2", lambda: Axes(spatial=TWO, batch=2)),
        ("rows axis of a mesh needs at least 1 rank, got -1", lambda: Placement(1, (ONE, (-1, 2)))),
        ("there must be at least one stage", lambda: Placement(1, ())),
        ("stages with the same number of dims", lambda: Placement(1, (ONE, (1, 1, 1)))),
        ("rank 2 is not in a world of 2", lambda: Placement(1, (TWO,)).positions(2)),
        (PER_STAGE, lambda: Placement(1, (ONE, ONE), batch=(1,))),
        (PER_STAGE, lambda: Placement(1, (ONE, ONE), batch=(2, 1))),
        ("divides either images or samples", lambda: Placement(1, (ONE, TWO), batch=(1, 2))),
        (
            r"tensor=\[2\] must have one number of ranks",
            lambda: Placement(1, (ONE, ONE), tensor=(2,)),
        ),
        *(
            (ORDER, lambda order=order: Placement(1, (TWO, ONE), order=order))
            for order in ((0, 1), (0, 0, 1), (1, 2, 3))
        ),
        *(
            (
                rf"2 spatial dims, got stream=\[{', '.join(map(str, stream))}\]",
                lambda stream=stream: Placement(1, (ONE, ONE), stream=stream),
            )
            for stream in ((2,), (2, 2, 1), (2, 0))
        ),
        ("samples or channels", lambda: Placement(1, (ONE, ONE), stream=(2, 2), batch=(1, 2))),
        (
            r"stream=\[1, 1\] cuts images into virtual tiles, which",
            lambda: Placement(1, (ONE, ONE), stream=ONE, tensor=(2, 2)),
        ),
        ("3 stages cannot be distributed over ranks 2 at", lambda: Placement(1, (ONE,) * 3, 2)),
        (
            rf"{SHARED} have equal numbers of parts, got .*\(2, 1\), .*\] over 2 groups of ranks$",
            lambda: Placement(1, (TWO, ONE, ONE, ONE), 2),
        ),
        (CHANNELS, lambda: Placement(1, (ONE,) * 4, 2, tensor=(1, 2, 1, 2))),
        (CHANNELS, lambda: Placement(1, (ONE,) * 2, mirrored=True, tensor=(1, 2))),
    ],
)
def test_what_fits_no_mesh_is_refused_with_its_values(sentence, make):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_stages_that_share_ranks_may_have_other_grids_of_as_many_parts():
    assert Placement(1, (TWO, ONE, (1, 2), ONE), interleave=2).world_size == 3


# --- axes


@pytest.mark.parametrize(
    ("axes", "text", "size"),
    [
        (Axes(), "data 1 x rows 1 x columns 1 = 1 rank", 1),
        (Axes(2, spatial=(2, 3)), "data 2 x rows 2 x columns 3 = 12 ranks", 12),
        (Axes(1, spatial=(4,)), "data 1 x positions 4 = 4 ranks", 4),
        (Axes(3, spatial=(2, 1, 2)), "data 3 x slices 2 x rows 1 x columns 2 = 12 ranks", 12),
        (Axes(2, (1, 1), batch=2), "data 2 x rows 1 x columns 1 x batch 2 = 4 ranks", 4),
        (
            Axes(2, spatial=(2, 1), tensor=3),
            "data 2 x rows 2 x columns 1 x tensor 3 = 12 ranks",
            12,
        ),
    ],
)
def test_the_product_is_spelt_out(axes: Axes, text: str, size: int) -> None:
    assert str(axes) == text
    assert axes.size == size


def test_parameters_are_replicated_along_all_axes_that_do_not_divide_them() -> None:
    axes = Axes(2, spatial=(2, 1), tensor=3)
    assert axes.replicated() == ("data", "rows", "columns", "batch")
    assert axes.replicated(sharded=True) == ("rows", "columns", "batch")


# --- partition


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


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_what_ranks_have_is_the_whole_dim_once(ranks: int):
    partition = joined([Partition.even(6, ranks), Partition.even(8, ranks, unit=4)])
    held = [interval for rank in range(ranks) for interval in partition.held(rank)]
    assert sorted(n for start, stop in held for n in range(start, stop)) == list(range(14))
