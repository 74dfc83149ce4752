"""The synthetic benchmark: configurations of keys, what rounds come to, and that ranks train."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from spatialdl.bench import synthetic

TINY = ["model=resnet18", "model.width=2", "data.image_size=[33,32]", "data.batch_size=3"]


def test_keys_with_several_values_make_a_configuration_each():
    keys = [*TINY, "parallel=none,sp", "data.batch_size=4,2"]
    sides = synthetic.sides_of(keys)
    assert [side.name for side in sides] == [
        "parallel=none data.batch_size=4",
        "parallel=none data.batch_size=2",
        "parallel=sp data.batch_size=4",
        "parallel=sp data.batch_size=2",
    ]
    assert [side.placement.world_size for side in sides] == [1, 1, 2, 2]
    assert [side.config.data.batch_size for side in sides] == [4, 2, 4, 2]
    assert all(side.config.model.width == 2 for side in sides)
    (alone,) = synthetic.sides_of(["parallel=dp"])
    assert alone.placement.world_size == 2


def test_rounds_of_all_turns_are_put_together(monkeypatch, tmp_path, capsys):
    order = []
    seconds = {
        "parallel=none": iter([[2.0, 2.0], [4.0, 4.0]]),
        "parallel=sp": iter([[1.0, 1.0]] * 2),
    }

    def run(side, options, folder):
        order.append(side.name)
        ranks = side.placement.world_size
        rounds = next(seconds[side.name])
        found = {"rounds": rounds, "images": 8, "ranks": ranks, "memory_mb": 10.0 * len(order)}
        return {**found, "device": "CPU"}

    monkeypatch.setattr(synthetic, "_run", run)
    options = ["--steps", "4", "--rounds", "2", "--out", str(tmp_path)]
    synthetic.main([*TINY, "parallel=none,sp", *options])
    assert order == ["parallel=none", "parallel=sp", "parallel=sp", "parallel=none"]
    result = json.loads((tmp_path / "synthetic.json").read_text())
    none, sp = result["sides"].values()
    assert none["rounds"] == [16.0, 16.0, 8.0, 8.0]  # images: 8 of 4 steps, over the seconds
    assert none["total"] == none["per_rank"] == 12.0
    assert none["total_spread"] == pytest.approx(1.96 * (64 / 3) ** 0.5)
    assert sp["total"] == 32.0
    assert sp["per_rank"] == 16.0
    assert sp["total_spread"] == 0.0
    assert sp["ratio"] == 3.0  # of 2, 2, 4 and 4
    assert none["memory_mb"] == 40.0
    told = capsys.readouterr().out
    row = told.partition("| parallel=sp ")[2].partition("\n")[0].split("|")
    expected = ["2", "16.00 +- 0.00", "32.00 +- 0.00", "3.00", "30"]
    assert [cell.strip() for cell in row[1:-1]] == expected
    assert "--out" not in result["command"]
    with Image.open(tmp_path / "synthetic.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5


@pytest.mark.parametrize(
    ("ranks", "images", "keys"),
    [
        (1, 3, ["parallel=none", "task=segmentation", "model=unet"]),
        pytest.param(
            *(2, 6, ["parallel=sp", "scheduler=one_cycle", "trainer.accumulate=2"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_train_and_are_timed(ranks, images, keys, tmp_path, capfd):
    keys = [*TINY, *keys, "device=cpu"]
    counts = ["--warmup", "1", "--rounds", "2", "--steps", "2"]
    synthetic.main([*keys, *counts, "--out", str(tmp_path)])
    (side,) = json.loads((tmp_path / "synthetic.json").read_text())["sides"].values()
    assert (side["ranks"], side["images"]) == (ranks, images)
    assert len(side["rounds"]) == 2
    assert side["total"] == pytest.approx(side["per_rank"] * ranks)
    assert side["memory_mb"] > 50
    assert "round 2: " in capfd.readouterr().out
    names = ["synthetic.json", "synthetic.md", "synthetic.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.slow
def test_ranks_that_fail_end_the_benchmark(tmp_path, capfd):
    """One pixel is left, of which BatchNorm makes no statistics."""
    with pytest.raises(RuntimeError, match="see above"):
        synthetic.main(["data.image_size=[2,2]", "data.batch_size=1", "--out", str(tmp_path)])
    assert "more than 1 value per channel" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
