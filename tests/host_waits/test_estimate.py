"""The table of estimates: what waits and copies add to the planner's time."""

from __future__ import annotations

import pytest

from tests.host_waits import estimate

COUNTED = {"waits": 100, "bytes": {"messages": 5e6, "collectives": 40e6}}


def test_copies_are_sums_and_halos_as_long_as_the_edges():
    one, four, many = estimate.CASES
    assert estimate.copied_bytes(one, COUNTED) == 0
    assert estimate.copied_bytes(four, COUNTED) == 2 * (40e6 + 2 * 5e6)
    assert estimate.copied_bytes(many, COUNTED) == 2 * (40e6 + 4 * 5e6)


def test_each_way_has_its_waits(monkeypatch):
    monkeypatch.setattr(estimate, "planned", lambda cluster, case: 0.01 * (1 + (case.ranks > 1)))
    alone, four, _ = estimate._rows("h100", COUNTED)
    assert alone[3:] == ["10.0 ms"] * 3 + ["100%"]
    copies = 1e3 * 100e6 / estimate.PCIE
    before, now = (20 + copies + 1e3 * n * estimate.WAIT_S for n in (estimate.WAITS_BEFORE, 100))
    assert four[3:] == [f"{before:.1f} ms", f"{now:.1f} ms", "20.0 ms", "50%"]


@pytest.mark.parametrize("cluster", ["h100", "mi300x"])
def test_a_step_on_more_gpus_with_the_same_tiles_takes_longer(cluster):
    one, four, _ = (estimate.planned(cluster, case) for case in estimate.CASES)
    assert one < four < 3 * one
