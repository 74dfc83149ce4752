"""The benchmark of memory over tiles: what it makes of its measurements."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from spatialdl.bench import bag_memory
from spatialdl.bench.bag_memory_worker import noise


@pytest.fixture
def result() -> dict[str, Any]:
    options = bag_memory._parse(["--tiles", "8", "16"])
    rows = [
        {"tiles": n, "ranks": ranks, "mode": mode, "memory_mb": 100.0 * n / ranks, "seconds": n / 4}
        for n, ranks, mode in product((8, 16), (1, 2), ("slices", "graph"))
    ]
    found = {"command": "bench", "machine": "2 cores, X", "date": "today", "device": "CPU"}
    return {**found, "options": vars(options), "rows": rows}


def test_the_table_has_a_line_for_each_number_of_tiles(result: dict[str, Any]) -> None:
    lines = [line for line in bag_memory.table(result).splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in lines if "--" not in line] == ["tiles", "8", "16"]
    assert lines[-1].split("|")[2:4] == [" 1600 MB, 4.0 s ", "  800 MB, 4.0 s "]


def test_the_picture_is_drawn(result: dict[str, Any], tmp_path: Any) -> None:
    bag_memory.draw(result, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 5000


def test_a_tile_of_noise_depends_on_its_number_alone() -> None:
    assert torch.equal(noise(0, 5, 4)[3:], noise(3, 5, 4))
    assert noise(2, 2, 4).shape == (0, 3, 4, 4)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        bag_memory._parse(["--tiles", "0"])
