"""The halo benchmark: what it makes of its measurements."""

from __future__ import annotations

import pytest

from spatialdl.bench import halo

SECONDS = {
    "spatialdl": [3e-5, 2.6e-5, 9e-5],
    "spatialdl, new strips": [4e-5, 4e-5, 4e-5],
    "persistent requests": [2e-5, 2e-5, 3e-5],
    "neighbor_alltoallw": [3e-5, 5e-5, 4e-5],
    "memcpy": [1e-6, 1e-6, 1e-6],
}


@pytest.fixture
def result():
    options = halo._parse(["--channels", "8", "--side", "32"])
    found = {"seconds": SECONDS, "bytes": 2052, "way": "packed pieces", "mpi": "Open MPI v5, x"}
    found["device"] = "CPU"
    return halo.summarise(options, found)


def test_ours_are_compared_with_the_best_by_hand_round_by_round(result):
    assert result["best"] == "persistent requests"
    assert result["ratio"]["spatialdl"] == pytest.approx(1.5)  # of 1.5, 1.3 and 3
    assert result["median"]["spatialdl"] == 3e-5
    assert result["strip_bytes"] == 1024


def test_the_table_has_a_line_for_each_variant(result):
    text = halo.table(result)
    starts = tuple(f"| {name} " for name in SECONDS)
    lines = [line for line in text.splitlines() if line.startswith(starts)]
    assert len(lines) == len(SECONDS)
    assert lines[0].split()[-2] == "1.50"
    assert "we took: packed pieces" in text


def test_the_picture_is_drawn(result, tmp_path):
    halo.draw(result, tmp_path / "halo.png")
    assert (tmp_path / "halo.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "text"), [(["--side", "0"], "at least 1"), (["--grid", "1", "1"], "no halo")]
)
def test_what_cannot_be_measured_is_told(arguments, text):
    with pytest.raises(ValueError, match=text):
        halo._parse(arguments)
