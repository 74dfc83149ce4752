"""The spatial benchmark: what it makes of its measurements."""

from __future__ import annotations

import json
import subprocess

import openslide
import pytest
from PIL import Image

from spatialdl.bench import analysis, analysis_worker, memory, pipeline, spatial, tiling
from spatialdl.bench.pipeline import layouts
from spatialdl.bench.worker import OVER_LIMIT
from spatialdl.comm.allocator import SWITCH
from spatialdl.comm.single_process import SingleProcess
from spatialdl.pipeline.simulate import StageSeconds, simulate

SECONDS_OF_A_SIDE = {"plain": [2.0, 4.0, 2.0], "one": [1.0, 3.0, 2.0], "ranks": [1.5, 1.5, 1.5]}


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
        seconds = SECONDS_OF_A_SIDE[side][(len(started) - 1) // 3]
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


@pytest.fixture
def processes(monkeypatch):
    """Stands in for the processes: ours take 1, 2 and 3 seconds, theirs twice as long."""
    runs: list[str] = []

    def run(command, environment):
        ours = any("spatialdl.bench.device" in word for word in command)
        runs.append(analysis.OURS if ours else analysis.THEIRS)
        seconds = (runs.count(runs[-1])) * (1.0 if ours else 2.0)
        return {
            "seconds": dict.fromkeys(analysis.WHAT, seconds),
            "values": dict.fromkeys(analysis.WHAT, 5.0),
        }

    monkeypatch.setattr(analysis, "run_worker", run)
    return runs


def test_ours_and_scikit_learn_take_turns(processes, tmp_path, capsys):
    analysis.main(["--ranks", "2", "--rounds", "3", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "analysis.json").read_text())
    assert processes == [analysis.OURS, analysis.THEIRS] * 3, "in turns"
    assert len(result["rows"]) == len(analysis.WHAT)
    for row in result["rows"]:
        assert row["seconds"] == {analysis.OURS: 2.0, analysis.THEIRS: 4.0}
        assert row["times_as_fast"] == pytest.approx(2)
    assert "| k-means, 16 clusters, 10 iterations" in capsys.readouterr().out
    assert (tmp_path / "analysis.png").stat().st_size > 10_000


def test_ours_and_scikit_learn_do_the_same():
    features, targets = analysis_worker.made(600, 40)
    theirs = analysis_worker.theirs(features)
    for name, method in analysis_worker.ours(features, SingleProcess()).items():
        wanted = theirs[name](features, targets, features[:30] + 0.5)
        assert method(features, targets, features[:30] + 0.5) == pytest.approx(wanted, rel=1e-9)
    assert set(theirs) == set(analysis.WHAT)


SECONDS_OF_A_WAY = {
    tiling.OPENSLIDE: 4.0,
    tiling.NATIVE: 0.5,
    tiling.OURS: 1.0,
    tiling.THROUGH: 5.0,
    tiling.PASSED: 0.4,
    tiling.HASHED: 0.2,
}


@pytest.fixture
def ways(monkeypatch):
    """Stands in for the processes: the second round takes twice as long."""
    commands: list[list[str]] = []

    def run(command, _environment):
        way, side = command[3], int(command[command.index("--tile-size") + 1])
        jobs = int(command[command.index("--jobs") + 1])
        turn = sum(other[3:] == command[3:] for other in commands)
        commands.append(command)
        cpu = SECONDS_OF_A_WAY[way] * (side / 256) ** 2 * (1 + turn)
        return {"cpu_seconds": cpu, "seconds": 1.2 * cpu / jobs, "tiles": 1000}

    monkeypatch.setattr(tiling, "run_worker", run)
    return commands


def test_ways_of_tiling_are_compared(ways, tmp_path):
    slide = tmp_path / "slide.tiff"
    tiling.main(
        ["--side", "1024", "--slide", str(slide), "--rounds", "2", "--out", str(tmp_path / "out")]
    )
    with openslide.OpenSlide(slide) as drawn:
        assert drawn.dimensions == (1024, 1024)
    result = json.loads((tmp_path / "out" / "tiling-1024.json").read_text())
    small, large = result["rows"]
    assert (small["side"], large["side"]) == (256, 1024)
    assert small["rates"][tiling.OURS] == pytest.approx(750)  # between 1000 and 500
    assert small["to_openslide"][tiling.NATIVE] == pytest.approx(8)
    assert large["to_openslide"][tiling.THROUGH] == pytest.approx(0.8)
    assert {jobs: each["rate"] for jobs, each in result["clock"].items()} == {
        **{"1": pytest.approx(625), "2": pytest.approx(1250)},
    }
    assert result["clock"]["2"]["to_one"] == pytest.approx(2)
    turn = [*tiling.WAYS, *tiling.WAYS, tiling.OURS, tiling.OURS]
    assert [command[3] for command in ways] == turn * 2
    assert [command[command.index("--slides") + 1] for command in ways[12:14]] == ["4", "4"]
    with Image.open(tmp_path / "out" / "tiling-1024.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5


@pytest.mark.parametrize("largest", [128, 448, 512, 1984, 5056])
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
    asked.clear()
    low, high = max(64, largest // 2 // 64 * 64), largest + 640  # known
    assert memory.search(measure, limit, 8192, low, high) == largest
    assert all(low < side < high for side in asked)


@pytest.fixture
def trainings(monkeypatch):
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


def test_the_largest_sides_are_found_for_each_number_of_ranks(trainings, tmp_path, capsys):
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


def test_a_fixed_size_that_is_too_large_is_told(trainings, tmp_path, capsys):
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


def test_nothing_fits_and_everything_fits():
    assert memory.search(lambda side: None, 100, 2048) == 0
    assert memory.search(lambda side: 1.0, 100, 2048) == 2048
    assert memory.search(lambda side: 1.0, 100, 2050) == 2048
