"""The benchmark of rare tiles: what it makes of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spatialdl.bench import bag_end_to_end


@pytest.fixture
def result() -> dict[str, Any]:
    options = bag_end_to_end._parse(["--seeds", "2", "--epochs", "2"])
    curves = {"frozen": [0.5, 0.55], "end_to_end": [0.6, 0.95]}
    rows = [
        {"arm": arm, "seed": seed, "curve": [v + seed / 50 for v in curve], "seconds": 10.0}
        for seed in range(2)
        for arm, curve in curves.items()
    ]
    found = {"command": "bench", "machine": "2 cores, X", "date": "today", "device": "CPU"}
    return {**found, "options": vars(options), "rows": rows}


def test_the_table_has_the_last_accuracy_of_each_seed_and_their_mean(
    result: dict[str, Any],
) -> None:
    lines = bag_end_to_end.table(result).splitlines()
    cells = [one.strip() for one in lines[-1].strip("|").split("|")]
    assert cells == ["end to end", "95.0%", "97.0%", "96.0%", "10"]


def test_the_picture_is_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    bag_end_to_end.draw(result, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 5000


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, tiles 2"):
        bag_end_to_end._parse(["--tiles", "1"])


def test_arms_differ_in_what_learns_alone(tmp_path: Path, monkeypatch: Any) -> None:
    commands = []
    monkeypatch.setattr(bag_end_to_end.worker, "run", lambda command, _: commands.append(command))
    options = bag_end_to_end._parse(["--folder", str(tmp_path)])
    for arm in bag_end_to_end.ARMS:
        with pytest.raises(RuntimeError, match="was interrupted"):
            bag_end_to_end._run(options, arm, 1)
    frozen, learning = (
        {word for word in command if not word.startswith("hydra.run.dir")} for command in commands
    )
    assert frozen - learning == {"trainer.freeze=[encoder.*]"}
    assert learning <= frozen
