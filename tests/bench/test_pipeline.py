"""The pipeline benchmark: what it makes of its measurements, and that its workers work."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from spatialdl.bench import pipeline
from spatialdl.bench.pipeline import layouts
from spatialdl.pipeline.simulate import StageSeconds, simulate


def test_layouts_are_compared_round_by_round(monkeypatch, tmp_path, capsys):
    def run(command, environment, show):
        assert environment["OMP_NUM_THREADS"] == "1"
        slow = {"seconds": [2.0, 4.0, 2.0], "ideal": [1.0, 4.0, 2.0], "images": 1, "held": 1}
        fast = {"seconds": [4.0, 4.0, 4.0], "ideal": [2.0, 3.0, 4.0], "images": 4, "held": 2}
        return {"device": "CPU", "layouts": {"layer parallel": slow, "other": fast}}

    monkeypatch.setattr(pipeline, "run_worker", run)
    pipeline.main(["--rounds", "3", "--size", "64", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "pipeline-resnet18-64-2ranks.json").read_text())
    assert result["layouts"]["layer parallel"]["speed_up"] == 1.0
    assert result["layouts"]["other"] == {
        "images_per_second": 1.0,
        "ideal_images_per_second": 4 / 3,
        "speed_up": 2.0,  # of 2, 4 and 2
        "reached": 0.75,  # of 0.5, 0.75 and 1
        "held": 2,
    }
    assert "other" in capsys.readouterr().out
    with Image.open(tmp_path / "pipeline-resnet18-64-2ranks.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5


@pytest.mark.slow
def test_ranks_measure_every_layout(tmp_path, capsys):
    small = ["--size", "64", "--microbatches", "2", "--rounds", "2"]
    pipeline.main([*small, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "pipeline-resnet18-64-2ranks.json").read_text())
    assert list(result["layouts"]) == [one.name for one in layouts(2, 2)]
    for name, one in result["rounds"].items():
        assert len(one["seconds"]) == len(one["ideal"]) == 2
        assert all(ideal > 0 for ideal in one["ideal"]), name
        assert result["layouts"][name]["reached"] > 0


@pytest.mark.slow
def test_a_rank_that_fails_ends_all(tmp_path, capfd):
    """The last stage sees one pixel, of which BatchNorm makes no statistics; the others wait."""
    with pytest.raises(RuntimeError, match="failed: see above"):
        pipeline.main(["--size", "32", "--rounds", "1", "--out", str(tmp_path)])
    assert "more than 1 value per channel" in capfd.readouterr().err


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_layouts_fit_their_ranks_and_hold_what_they_promise(ranks):
    held = {}
    for one in layouts(ranks, 8):
        assert one.placement.world_size == ranks
        costs = StageSeconds.even(one.placement.stages)
        held[one.name] = max(simulate(one.schedule.train, costs).peak_held)
    assert held["GPipe"] == 8
    assert held["1F1B"] == held["zero bubble"] == ranks
    assert [held[name] for name in ("layer parallel", "GEMS mast", "GEMS master")] == [1, 1, 1]
    assert held["GEMS basic"] == 2


@pytest.mark.parametrize(
    "wrong", [["--rounds", "0"], ["--ranks", "1"], ["--microbatches", "3"], ["--size", "0"]]
)
def test_nothing_of_a_kind_is_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        pipeline.main(wrong)
