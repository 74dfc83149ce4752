"""What the benchmarks share."""

from __future__ import annotations

import json
import os
import sys

import pytest

from spatialdl import allocator
from spatialdl.bench import results


@pytest.mark.parametrize(("ranks", "grid"), [(1, (1, 1)), (2, (2, 1)), (4, (2, 2)), (6, (3, 2))])
def test_grids_are_as_square_as_can_be(ranks, grid):
    assert results.grid_of(ranks) == grid


@pytest.mark.parametrize("plain", [False, True])
def test_memory_is_as_pytorch_comes_or_as_the_product_sets_it(plain):
    found = results.environment(2, plain)
    assert found["OMP_NUM_THREADS"] == "2"
    settings = {allocator.SWITCH: "0"} if plain else allocator.environment()
    assert settings.items() <= found.items()


def test_a_worker_tells_in_its_last_line():
    program = "import os; print('starting'); print(os.environ['FOUND'])"
    environment = {**os.environ, "FOUND": '{"seconds": [1.5]}'}
    found = results.run_worker([sys.executable, "-c", program], environment)
    assert found == {"seconds": [1.5]}


def test_a_worker_that_fails_is_quoted():
    with pytest.raises(RuntimeError, match="no such model"):
        results.run_worker([sys.executable, "-c", "raise SystemExit('no such model')"], {})


def test_a_result_is_printed_written_and_drawn(tmp_path, capsys):
    path = tmp_path / "new" / "halo-1.5"
    results.publish({"a": 1}, str, lambda result, file: file.touch(), path)
    assert json.loads((tmp_path / "new" / "halo-1.5.json").read_text()) == {"a": 1}
    assert (tmp_path / "new" / "halo-1.5.png").exists()
    assert "{'a': 1}" in capsys.readouterr().out
