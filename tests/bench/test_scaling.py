"""The planner's benchmark: every run it makes is one that the command takes."""

from __future__ import annotations

import json

from hydra import compose, initialize_config_module
from PIL import Image

from spatialdl.bench import channel_scaling, plan, scaling
from spatialdl.bench.channel_scaling import CURVES, TrainingCase
from spatialdl.bench.scaling import ScalingCase
from spatialdl.training.checks import check_config


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


def test_curves_of_divided_channels_are_simulated_and_drawn(monkeypatch, tmp_path, capsys):
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


def test_the_layouts_are_at_least_ten_and_the_command_takes_them():
    assert len(plan.LAYOUTS) >= 10
    for overrides in plan.LAYOUTS.values():
        with initialize_config_module("spatialdl.conf", version_base="1.3"):
            assert check_config(compose("train", list(overrides))).world_size <= 3


def test_predictions_stand_beside_what_was_measured(monkeypatch, tmp_path, capsys):
    rows = iter([(100, 105, 1.0, 1.1), (100, 200, 1.0, 2.0)])

    def row(overrides, cluster, steps):
        assert steps == 3
        names = ("predicted_mb", "measured_mb", "predicted_s", "measured_s")
        return {"ranks": 1, **dict(zip(names, next(rows), strict=True))}

    monkeypatch.setattr(plan, "calibrate", lambda: {})
    monkeypatch.setattr(plan, "cluster_of", lambda settings: None)
    monkeypatch.setattr(plan, "_row", row)
    plan.main(["--only", "none", "sp 2x1", "--out", str(tmp_path)])
    told = capsys.readouterr().out
    assert "memory within 10%: 1 of 2; time within 20%: 1 of 2" in told
    assert "-50%" in told
    assert [one["name"] for one in json.loads((tmp_path / "plan.json").read_text())["rows"]] == [
        "none",
        "sp 2x1",
    ]
    with Image.open(tmp_path / "plan.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5
