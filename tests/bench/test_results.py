"""What the benchmarks share."""

from __future__ import annotations

import json

import pytest

from spatialdl.bench import results


@pytest.mark.parametrize(("ranks", "grid"), [(1, (1, 1)), (2, (2, 1)), (4, (2, 2)), (6, (3, 2))])
def test_grids_are_as_square_as_can_be(ranks, grid):
    assert results.grid_of(ranks) == grid


def test_a_result_is_printed_written_and_drawn(tmp_path, capsys):
    path = tmp_path / "new" / "halo-1.5"
    results.publish({"a": 1}, str, lambda result, file: file.touch(), path)
    assert json.loads((tmp_path / "new" / "halo-1.5.json").read_text()) == {"a": 1}
    assert (tmp_path / "new" / "halo-1.5.png").exists()
    assert "{'a': 1}" in capsys.readouterr().out
