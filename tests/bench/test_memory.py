from __future__ import annotations

import json
import subprocess

import pytest
from PIL import Image

from spatialdl.bench import memory
from spatialdl.bench.worker import OVER_LIMIT


@pytest.mark.parametrize("largest", [64, 128, 448, 512, 576, 1984, 2048, 5056, 8192])
@pytest.mark.parametrize("constant", [0, 200])
def test_the_search_ends_at_the_largest_side_that_fits(largest, constant):
    limit = 1500
    asked: list[int] = []

    def measure(side: int) -> float | None:
        assert side not in asked
        asked.append(side)
        found = constant + (limit - constant) * (side / (largest + 32)) ** 2
        return found if found <= limit else None

    assert memory.search(measure, limit, 8192) == largest
    assert len(asked) <= 12


def test_nothing_fits_and_everything_fits():
    assert memory.search(lambda side: None, 100, 2048) == 0
    assert memory.search(lambda side: 1.0, 100, 2048) == 2048
    assert memory.search(lambda side: 1.0, 100, 2050) == 2048


@pytest.mark.parametrize("largest", [512, 576, 960])
def test_known_sides_bound_the_search(largest):
    asked: list[int] = []

    def measure(side: int) -> float | None:
        asked.append(side)
        return 1000 * (side / largest) ** 2 if side <= largest else None

    assert memory.search(measure, 1000, 8192, 512, 1024) == largest
    assert all(512 < side < 1024 for side in asked)
    assert memory.search(measure, 1000, 512, 512) == 512


@pytest.fixture
def runs(monkeypatch):
    """Stands in for training: MB by area, ranks and recomputation; 1 rank is killed at 960."""
    commands: list[list[str]] = []

    def run(command, **_):
        commands.append(command)
        side = int(command[command.index("--size") + 1])
        grid = command[command.index("--grid") + 1 :][:2] if "--grid" in command else (1, 1)
        ranks = int(grid[0]) * int(grid[1])
        found = 100 + side**2 / 2**10 / ranks * (0.5 if "--recompute" in command else 1.0)
        limit = float(command[command.index("--limit") + 1]) if "--limit" in command else 1e9
        if ranks == 1 and side >= 960:
            return subprocess.CompletedProcess(command, -9, "", "Killed")
        if found > limit:
            return subprocess.CompletedProcess(command, OVER_LIMIT, "over limit\n", "")
        return subprocess.CompletedProcess(command, 0, json.dumps({"memory_mb": found}), "")

    monkeypatch.setattr(memory.subprocess, "run", run)
    monkeypatch.setattr(memory, "mpiexec_command", lambda ranks: ["mpiexec", "-n", str(ranks)])
    return commands


def test_table_json_and_picture(runs, tmp_path, capsys):
    memory.main(["--limit", "1100", "--size", "512", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "memory-resnet18-1100mb.json").read_text())
    found = {(row["ranks"], row["recompute"]): row["largest"] for row in result["rows"]}
    assert found == {
        (1, False): 896,  # killed at 960
        (2, False): 1408,
        (4, False): 1984,
        (1, True): 896,
        (2, True): 1984,
        (4, True): 2816,
    }
    printed = capsys.readouterr().out
    assert "4 ranks, recompute" in printed
    assert "1408x1408" in printed
    with Image.open(tmp_path / "memory-resnet18-1100mb.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5


def test_a_fixed_size_that_is_too_large_is_told(runs, tmp_path, capsys):
    memory.main(["--limit", "1100", "--size", "1024", "--ranks", "1", "2", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    (one,) = [line for line in lines if line.startswith("| 1 rank  ")]
    assert one.replace("|", "").split()[-1] == "killed"
    assert (tmp_path / "memory-resnet18-1100mb.png").exists()


def test_a_run_that_fails_for_another_reason_is_no_answer(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, "", "no such network")
    monkeypatch.setattr(memory.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="no such network"):
        memory.main(["--out", str(tmp_path)])


@pytest.mark.parametrize("wrong", [["--limit", "0"], ["--ranks", "0"], ["--largest", "8"]])
def test_nothing_of_a_kind_is_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        memory.main(wrong)
