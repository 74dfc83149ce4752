from __future__ import annotations

import pytest

from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.compilable import check_compilable, check_run
from spatialdl.pipeline.schedule import make_schedule

ONE = ((1, 1),)


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [
        ("gpipe", Placement(1, ONE)),
        ("gpipe", Placement(3, ONE)),
        ("1f1b", Placement(2, ONE * 3)),
        ("interleaved", Placement(1, ONE * 4, 2)),
        ("mast", Placement(1, ONE * 2, 1, True)),
    ],
)
def test_layouts_with_a_rank_a_stage_compile(schedule, placement):
    check_compilable(placement, make_schedule(schedule, placement, 4), "none", False)


@pytest.mark.parametrize(
    ("placement", "schedule", "recompute", "shard", "message"),
    [
        (Placement(1, ((2, 1),)), "gpipe", "none", False, r"parallel\.grid=\[2, 1\], .*take par"),
        (Placement(1, ((2, 1), (1, 1)), 1, False, (1, 2)), "gpipe", "none", False, r"grid=\[2, 1"),
        (Placement(1, ONE * 2, 1, False, (1, 2)), "gpipe", "none", False, "local_dp=2, .*take"),
        (Placement(1, ONE), "gpipe", "block", False, "recompute=block, as .*leave one"),
        (Placement(2, ONE), "gpipe", "none", True, "shard_state=true, as FSDP2"),
        (Placement(1, ONE * 2), "zero_bubble", "none", False, "schedule=zero_bubble, .*take gp"),
    ],
)
def test_others_are_refused_by_name(placement, schedule, recompute, shard, message):
    order = make_schedule(schedule, placement, 2)
    with pytest.raises(
        ValueError, match=rf"trainer\.compile=true cannot be combined with .*{message}"
    ):
        check_compilable(placement, order, recompute, shard)


def test_ranks_may_wait_while_another_one_compiles():
    for timeout in (None, 0, 600, 1800):
        check_run(timeout, False)
    with pytest.raises(ValueError, match=r"comm\.timeout=60, as ranks wait .* at least 600"):
        check_run(60, False)


def test_the_same_bits_are_not_promised():
    with pytest.raises(ValueError, match=r"trainer\.deterministic=true, as the first step"):
        check_run(None, True)
