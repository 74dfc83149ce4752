"""Whole images against tiles: small and real, and what is made of the runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from spatialdl.bench import whole_vs_tiles
from spatialdl.data import ShardDataset
from spatialdl.planning import worker


def finish(run: Path, accuracies: list[float], memory: list[float], seconds: float) -> None:
    """What a finished run leaves, of two steps an epoch."""
    validation = [{"slide_accuracy": value, "slides": 64} for value in accuracies]
    run.mkdir(parents=True)
    (run / "finished.json").write_text(
        json.dumps(
            {
                **{"validation": validation, "loss": [0.7, 0.5] * len(accuracies)},
                **{"peak_memory_mb": memory, "seconds": seconds, "cpu_seconds": 2 * seconds},
            }
        )
    )


def test_what_is_finished_is_put_together(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(worker, "run", None)  # nothing is started
    folder = tmp_path / "10+4"
    for seed, last in enumerate([1.0, 0.9, 0.95]):
        run = folder / "runs" / f"whole-2epochs-seed{seed}"
        finish(run, [0.5, last], [300.0 + seed, 200.0], 60 + seed)
        finish(folder / "runs" / f"tiles-2epochs-seed{seed}", [0.6, 0.5], [250.0, 260.0], 30)
    for ranks in (1, 2, 4):
        finish(folder / "runs" / f"memory-{ranks}ranks", [], [1200 / ranks] * ranks, 9)
    (folder / "prepared.json").write_text('{"seconds": 60, "cpu_seconds": 70}')
    words = ["--slides", "10", "--validation", "4", "--epochs", "2", "--folder", str(tmp_path)]
    whole_vs_tiles.main([*words, "--out", str(tmp_path / "out")])

    result = json.loads((tmp_path / "out" / "whole-vs-tiles.json").read_text())
    whole, tiles = result["found"]["whole"], result["found"]["tiles"]
    assert whole["accuracies"] == [1.0, 0.9, 0.95]
    assert (whole["mean"], tiles["mean"]) == (pytest.approx(0.95), 0.5)
    assert (whole["memory_mb"], tiles["memory_mb"]) == (302, 260)
    assert (whole["seconds"], whole["cpu_seconds"], whole["steps"]) == (61, 122, 4)
    assert result["memory_mb"] == {"1": 1200, "2": 600, "4": 300}
    assert result["seconds"] == 60 + 60 + 61 + 62 + 3 * 30 + 3 * 9
    printed = capsys.readouterr().out
    assert "95.0% 90.0 to 100.0%" in " ".join(printed.split())
    assert "1200 on 1 rank, 600 on 2 ranks, 300 on 4 ranks" in printed
    with Image.open(tmp_path / "out" / "whole-vs-tiles.png") as picture:
        assert len(picture.convert("RGB").getcolors(10_000_000)) > 1000


@pytest.mark.slow
def test_a_small_one_end_to_end_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_vs_tiles, "SIDE", 512)
    monkeypatch.setattr(whole_vs_tiles, "BATCH", 2)
    monkeypatch.setattr(whole_vs_tiles, "LAYOUTS", {2: ("parallel=sp", "model.width=2")})
    words = ["--slides", "4", "--validation", "2", "--epochs", "1", "--seeds", "1"]
    words += ["--folder", str(tmp_path), "--out", str(tmp_path / "out")]
    whole_vs_tiles.main(words)
    result = json.loads((tmp_path / "out" / "whole-vs-tiles.json").read_text())
    assert [(run["arm"], run["seed"]) for run in result["runs"]] == [("whole", 0), ("tiles", 0)]
    assert [(run["slides"], run["steps"]) for run in result["runs"]] == [(2, 2)] * 2

    folder = tmp_path / "4+2"
    whole, tiles = (ShardDataset(folder / name) for name in ("whole", "tiles"))
    assert (len(whole), len(tiles)) == (6, 6 * 4)
    assert whole.classes == tiles.classes == ["averted", "facing"]
    with (folder / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["facing", "averted"] * 3
    assert [row["split"] for row in rows] == ["train"] * 4 + ["val"] * 2

    monkeypatch.setattr(worker, "run", None)
    whole_vs_tiles.main(words)
    again = json.loads((tmp_path / "out" / "whole-vs-tiles.json").read_text())
    assert again["runs"] == result["runs"]


def test_a_run_that_was_stopped_is_not_taken_for_a_finished_one(tmp_path, monkeypatch):
    (tmp_path / "10+4").mkdir()
    (tmp_path / "10+4" / "prepared.json").write_text('{"seconds": 60, "cpu_seconds": 70}')
    monkeypatch.setattr(whole_vs_tiles, "_COMMAND", ("-c", "pass"))  # as one that a signal ended
    words = ["--slides", "10", "--validation", "4", "--folder", str(tmp_path)]
    with pytest.raises(RuntimeError, match="was interrupted"):
        whole_vs_tiles.main(words)
    assert not list(tmp_path.rglob("finished.json"))
