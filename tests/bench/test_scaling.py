from __future__ import annotations

import json

import pytest
from PIL import Image

from spatialdl.bench import scaling
from spatialdl.bench.scaling import ScalingCase, efficiencies


def test_efficiency_is_that_of_a_gpu_relative_to_the_smallest_number():
    points = [None, {"ranks": 2, "images_per_second": 4.0}, {"ranks": 8, "images_per_second": 8.0}]
    assert efficiencies(points) == [(2, 1.0), (8, 0.5)]
    assert efficiencies([None]) == []


def test_curves_are_simulated_and_drawn(monkeypatch, tmp_path, capsys):
    case = ScalingCase("small", "resnet18", 64, 1, (1, 2), 2, 0.5)
    monkeypatch.setattr(scaling, "CASES", (case,))
    monkeypatch.setattr(scaling, "SIDE", 256)
    scaling.main(["--most", "2", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "scaling-infiniband.json").read_text())
    curves = result["cases"][0]["curves"]
    assert [point["batch"] for point in curves["weak"]] == [2, 4]
    assert [point["batch"] for point in curves["strong"]] == [2, 2]
    assert all(point["seconds"] > 0 for points in curves.values() for point in points)
    seconds = result["hybrid"]
    # of images so small messages take most of the time
    assert 0 < seconds["pipeline"] < seconds["layers"] < seconds["space, and with a pipeline"]
    printed = capsys.readouterr().out
    assert "small, weak scaling" in printed
    assert "1.00 times layers" in printed
    with Image.open(tmp_path / "scaling-infiniband.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5


@pytest.mark.parametrize("wrong", [["--most", "0"], ["--cluster", "abacus"]])
def test_wrong_questions_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be at least 1 GPU|abacus is unknown"):
        scaling.main(wrong)
