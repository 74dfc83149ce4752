"""The benchmark of encoders trained on slides: its slides, and what it makes of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spatialdl.bench import bag_end_to_end
from spatialdl.bench.bag_end_to_end_worker import ARMS, MARK, SHAPES, SIDE, TILES, draw_slide


@pytest.fixture
def result() -> dict[str, Any]:
    options = bag_end_to_end._parse(["--seeds", "2", "--epochs", "2"])
    runs = [
        {"arm": arm, "seed": seed, "accuracy": [0.5, 0.6 + 0.1 * n + 0.1 * seed], "seconds": 3.0}
        for n, arm in enumerate(ARMS)
        for seed in range(2)
    ]
    return bag_end_to_end.summarise(options, runs)


def kinds_in(tiles: torch.Tensor) -> list[int]:
    """How many marks of each rare kind are in a slide: nothing else looks exactly like one."""
    windows = tiles[:, 0].unfold(1, MARK, 1).unfold(2, MARK, 1)
    assert windows.shape[:3] == (TILES, SIDE - MARK + 1, SIDE - MARK + 1)
    found = []
    for shape in SHAPES[1:]:
        alike = ((windows == shape) | (shape == 0)).flatten(3).all(3)
        found.append(int(alike.sum()))
    return found


def test_a_class_depends_on_both_kinds_and_each_occurs_as_often_in_both() -> None:
    counts = {label: [] for label in (0, 1)}
    for seed in range(60):
        tiles, label = draw_slide(seed)
        found = kinds_in(tiles)
        assert sum(found) == 2
        assert bool(label) == (found == [1, 1])
        counts[int(label)].append(found[0])
    assert sum(counts[1]) == 30
    assert 20 <= sum(counts[0]) <= 40


def test_an_arm_is_summarised_over_its_seeds(result: dict[str, Any]) -> None:
    arm = result["arms"]["together"]
    assert arm["accuracy"] == pytest.approx(0.85)
    lines = bag_end_to_end.table(result).splitlines()
    cells = [cell.strip() for cell in lines[-1].split("|")[1:4]]
    assert cells == ["trained together", "85.0 ± 7.1", "80.0, 90.0"]


def test_the_picture_is_drawn(result: dict[str, Any], tmp_path: Any) -> None:
    bag_end_to_end.draw(result, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 5000


def test_a_finished_run_is_not_done_again_unless_its_settings_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], *_: Any, **__: Any) -> dict[str, Any]:
        asked.append(command)
        return {"accuracy": [0.5], "seconds": 1.0}

    monkeypatch.setattr(bag_end_to_end, "run_worker", run)
    words = ["--folder", str(tmp_path)]
    for more in ([], [], ["--epochs", "3"]):
        options = bag_end_to_end._parse([*words, *more])
        assert bag_end_to_end._train(options, "proxy", 1)["accuracy"] == [0.5]
    assert len(asked) == 2
    assert asked[1][-7:].count("--epochs=3") == 1


@pytest.mark.slow
def test_an_arm_trains_on_one_rank(tmp_path: Path) -> None:
    words = ["--folder", str(tmp_path), "--slides", "4", "--validation", "4", "--epochs", "1"]
    found = bag_end_to_end._train(bag_end_to_end._parse(words), "random", 0)
    assert len(found["accuracy"]) == 1
