"""The benchmark of late layers: what it makes of its measurements."""

from __future__ import annotations

from typing import Any

import pytest

from spatialdl.bench import late
from spatialdl.planning.auto import cluster_file
from spatialdl.planning.setup import cluster_named

SECONDS = {"space": [2.0, 4.0, 3.0], "samples": [1.0, 4.0, 6.0], "channels": [1.0, 1.0, 3.0]}


@pytest.fixture
def result() -> dict[str, Any]:
    options = late._parse(["--ranks", "2", "--size", "64"])
    sides = {
        name: {"seconds": times, "cpu_seconds": 2.5, "held_mb": 7.0, "weights_mb": 9, "sent_mb": 1}
        for name, times in SECONDS.items()
    }
    planned = {"space": 3.0, "samples": 2.0, "channels": 1.5}
    return late.summarise(options, {"device": "CPU", "sides": sides}, planned)


def test_sides_are_compared_with_space_round_by_round(result: dict[str, Any]) -> None:
    sides = result["sides"]
    assert sides["samples"]["ratio"] == pytest.approx(1.0)  # of 0.5, 1 and 2
    assert sides["channels"]["median"] == 1.0
    assert result["command"].endswith("late --network resnet50 --ranks 2 --batch 4 --size 64 "
                                      "--rounds 3 --device cpu --cluster this_machine")  # fmt: skip


def test_the_table_has_a_line_for_each_side(result: dict[str, Any]) -> None:
    lines = [line for line in late.table(result).splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in lines if "--" not in line] == ["divided", *SECONDS]
    assert lines[-1].split()[3:12:2] == ["1", "0.50", "1.5", "2.5", "7.0"]


def test_the_planners_choice_stands_beside_the_fastest(result: dict[str, Any]) -> None:
    words = "the planner picks channels, the fastest of the three"
    assert late.table(result).splitlines()[-1] == words
    result["sides"]["samples"]["predicted"] = 1.0
    words = "the planner picks samples, which takes 300% longer than channels"
    assert late.picked(result["sides"]) == words


def test_the_planner_divides_dense_layers_by_channels_and_convolutions_of_maps_not() -> None:
    cluster = cluster_named(cluster_file("infiniband"))
    for network, choice in (("vgg16", "channels"), ("resnet50", "samples")):
        options = late._parse(["--ranks", "2", "--network", network])
        found = late.predicted(options, cluster)
        assert min(found, key=lambda name: found[name]) == choice


def test_the_picture_is_drawn(result: dict[str, Any], tmp_path: Any) -> None:
    late.draw(result, tmp_path / "late.png")
    assert (tmp_path / "late.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rounds", "0"], "at least 1"),
        (["--ranks", "1"], "ranks at least 2"),
        (["--batch", "6"], "--batch 6 must be a multiple of --ranks 4"),
    ],
)
def test_what_cannot_be_measured_is_told(arguments: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        late._parse(arguments)
