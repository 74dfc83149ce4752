"""The spatial benchmark: what it makes of its measurements."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from spatialdl.bench import spatial
from spatialdl.comm.allocator import SWITCH

SECONDS = {"plain": [2.0, 4.0, 2.0], "one": [1.0, 3.0, 2.0], "ranks": [1.5, 1.5, 1.5]}


@pytest.fixture
def commands(monkeypatch):
    """Stands in for training: three rounds of all sides."""
    started: list[list[str]] = []

    def run(command, environment):
        started.append(command)
        tuned = "GLIBC_TUNABLES" in environment
        side = (
            ("ranks" if tuned else "plain") if "--grid" in command else "one" if tuned else "plain"
        )
        seconds = SECONDS[side][(len(started) - 1) // 3]
        found = {"seconds": [seconds, 9.0, 0.5], "cpu_seconds": 2 * seconds, "memory_mb": 100.0}
        return {**found, "device": "CPU"}

    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(spatial, "run_worker", run)
    return started


def test_ranks_are_compared_with_both_others_round_by_round(commands, tmp_path, capsys):
    spatial.main(["--rounds", "3", "--size", "64", "--out", str(tmp_path)])
    assert len(commands) == 9
    result = json.loads((tmp_path / "spatial-resnet18-64-2ranks.json").read_text())
    assert result["median"]["2 ranks"] == {"seconds": 1.5, "cpu_seconds": 3.0, "memory_mb": 100.0}
    assert result["ratio"]["plain PyTorch"]["seconds"] == 0.75  # of 0.75, 0.375 and 0.75
    assert result["ratio"]["one process"]["cpu_seconds"] == 0.75  # of 1.5, 0.5 and 0.75
    assert "speed of 2 ranks: 1.33 of plain PyTorch, 1.33 of one process" in capsys.readouterr().out
    with Image.open(tmp_path / "spatial-resnet18-64-2ranks.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5


def test_volumes_are_cut_as_cubes_and_ranks_may_have_plain_memory(commands, tmp_path, capsys):
    words = ["--model", "unet3d", "--size", "96", "--ranks", "2", "--plain-ranks", "--rounds", "2"]
    spatial.main([*words, "--out", str(tmp_path)])
    grids = [one[one.index("--grid") + 1 :] for one in commands if "--grid" in one]
    assert grids == [["2", "1", "1"]] * 4
    result = json.loads((tmp_path / "spatial-unet3d-96-2ranks.json").read_text())
    assert list(result["median"]) == ["plain PyTorch", "one process", "2 plain ranks", "2 ranks"]
    assert " --plain-ranks " in result["command"]
    assert "of 2 plain ranks, on the same cores" in capsys.readouterr().out


def test_ddp_shares_the_same_batch(commands, tmp_path):
    words = ["--ddp", "--batch", "4", "--rounds", "2", "--size", "64", "--out", str(tmp_path)]
    spatial.main(words)
    (command, *_) = [one for one in commands if "--ddp" in one]
    assert command[command.index("--batch") + 1] == "4"
    result = json.loads((tmp_path / "spatial-resnet18-64-2ranks.json").read_text())
    assert list(result["median"]) == ["plain PyTorch", "one process", "DDP, 2 ranks", "2 ranks"]
    assert " --ddp " in result["command"]


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--threads", "3"], ["--ddp"]])
def test_nothing_of_a_kind_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must be|cannot be shared"):
        spatial.main(wrong)
