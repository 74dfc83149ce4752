from __future__ import annotations

import json

import pytest
from PIL import Image

from spatialdl.bench import channel_scaling
from spatialdl.bench.channel_scaling import CURVES, TrainingCase, gain


def test_curves_are_simulated_and_drawn(monkeypatch, tmp_path, capsys):
    case = TrainingCase("small", "resnet18", (64, 64), 2, (("num_classes", 4),))
    monkeypatch.setattr(channel_scaling, "CASES", (case,))
    channel_scaling.main(["--most", "4", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "channel-scaling-infiniband.json").read_text())
    (found,) = result["cases"]
    assert [point["ranks"] for point in found["points"]] == [1, 2, 4]
    one, two, four = (point["curves"] for point in found["points"])
    assert set(one) == set(two) == set(CURVES)
    assert one["samples"] == one["all three"]
    assert set(four) == set(CURVES) - {"samples"}  # there are two images
    fastest = min(four["and space"]["seconds"], four["and channels"]["seconds"])
    assert four["all three"]["seconds"] <= fastest
    assert "by channels" in four["and channels"]["layout"]
    assert "by channels" not in four["and space"]["layout"]
    printed = capsys.readouterr().out
    assert "simulated: infiniband on paper" in printed
    assert "small, 2 images, seconds a step" in printed
    with Image.open(tmp_path / "channel-scaling-infiniband.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5


def test_the_gain_of_channels_is_that_over_samples_and_space():
    curves = {"and space": {"seconds": 3.0}, "all three": {"seconds": 2.0}}
    assert gain(curves) == "1.50"
    assert gain({"all three": {"seconds": 2.0}}) == "-"


@pytest.mark.parametrize("wrong", [["--most", "0"], ["--cluster", "abacus"]])
def test_wrong_questions_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be at least 1 GPU|abacus is unknown"):
        channel_scaling.main(wrong)
