"""The planner's benchmark: every run it makes is one that the command takes."""

from __future__ import annotations

import json

import pytest
from hydra import compose, initialize_config_module
from PIL import Image

from spatialdl.bench import plan
from spatialdl.training.checks import check_config


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


def test_one_step_is_too_few():
    with pytest.raises(ValueError, match="--steps 1 must be at least 2: the first is a warm-up"):
        plan.main(["--steps", "1"])
