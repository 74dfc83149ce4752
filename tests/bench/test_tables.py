"""What benchmarks make of their measurements: ratios of rounds, tables, pictures."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from spatialdl.bench import backend, bag_end_to_end, bag_memory, halo, late, stream, stream_picture
from spatialdl.bench.bag_memory_worker import noise
from spatialdl.planning.auto import cluster_file
from spatialdl.planning.setup import cluster_named

ABOUT = {"command": "bench", "machine": "2 cores, X", "date": "today", "device": "CPU"}


def cells(table: str, start: str = "") -> list[list[str]]:
    """Of the lines of a table that start like this; without its rule."""
    lines = [line for line in table.splitlines() if line.startswith(f"| {start}")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if not row[-1].startswith("--")]


def of_halo() -> dict[str, Any]:
    seconds = {
        "spatialdl": [3e-5, 2.6e-5, 9e-5],
        "spatialdl, new strips": [4e-5, 4e-5, 4e-5],
        "persistent requests": [2e-5, 2e-5, 3e-5],
        "neighbor_alltoallw": [3e-5, 5e-5, 4e-5],
        "memcpy": [1e-6, 1e-6, 1e-6],
    }
    options = halo._parse(["--channels", "8", "--side", "32"])
    found = {"seconds": seconds, "bytes": 2052, "way": "packed pieces", "mpi": "Open MPI v5, x"}
    return halo.summarise(options, {**found, "device": "CPU"})


def test_halos_are_compared_with_the_best_by_hand_round_by_round():
    result = of_halo()
    assert result["best"] == "persistent requests"
    assert result["ratio"]["spatialdl"] == pytest.approx(1.5)  # of 1.5, 1.3 and 3
    assert result["median"]["spatialdl"] == 3e-5
    assert result["strip_bytes"] == 1024
    text = halo.table(result)
    assert "1.50" in cells(text, "spatialdl ")[0]
    assert all(cells(text, f"{name} ") for name in result["seconds"])
    assert "we took: packed pieces" in text


def of_backend() -> dict[str, Any]:
    names = ("mpi4py backend", "raw mpi4py", "gloo", "PyTorch's call")
    small = [2e-5, 3e-5, 9e-5], [1e-5] * 3, [4e-5, 9e-5, 9e-5], [1e-5, 1e-5, 2e-5]
    large = [2e-3] * 3, [2e-3] * 3, [3e-3] * 3, [1e-5] * 3
    sums = {
        size: dict(zip(names, times, strict=True))
        for size, times in (("4", small), ("4194304", large))
    }
    step = {
        "mpi4py backend": [0.4, 0.5, 1.0],
        "gloo": [0.6, 0.6, 0.7],
        "no communication": [0.3] * 3,
    }
    found = {"all_reduce": sums, "step": step, "parameters": 23_500_000, "device": "CPU"}
    options = backend._parse(["--ranks", "2", "--batch", "3"])
    return backend.summarise(options, {**found, "mpi": "Open MPI v5, x", "other": "gloo"})


def test_differences_and_ratios_of_backends_are_taken_round_by_round():
    result = of_backend()
    assert result["sizes"]["4"]["above_raw_us"] == pytest.approx(20)
    assert result["sizes"]["4"]["to_other"] == pytest.approx(2)  # of 2, 3 and 1
    assert result["sizes"]["4194304"]["to_other"] == pytest.approx(1.5)
    assert result["step"]["throughput_to_other"] == pytest.approx(1.2)  # of 1.5, 1.2 and 0.7
    assert result["step"]["throughput_to_silent"] == pytest.approx(0.6)
    text = backend.table(result)
    assert cells(text, "4 B")[0][1:] == ["30.0", "10.0", "90.0", "20.0", "10.0", "2.00"]
    assert cells(text, "mpi4py backend")[0][1:] == ["500", "12.00"]  # six images
    assert "throughput: 1.20 of gloo's" in text.splitlines()[-1]


def of_late() -> dict[str, Any]:
    seconds = {"space": [2.0, 4.0, 3.0], "samples": [1.0, 4.0, 6.0], "channels": [1.0, 1.0, 3.0]}
    options = late._parse(["--ranks", "2", "--size", "64"])
    sides = {
        name: {"seconds": times, "cpu_seconds": 2.5, "held_mb": 7.0, "weights_mb": 9, "sent_mb": 1}
        for name, times in seconds.items()
    }
    planned = {"space": 3.0, "samples": 2.0, "channels": 1.5}
    return late.summarise(options, {"device": "CPU", "sides": sides}, planned)


def test_late_layers_are_compared_with_space_and_with_the_planners_choice():
    result = of_late()
    sides = result["sides"]
    assert sides["samples"]["ratio"] == pytest.approx(1.0)  # of 0.5, 1 and 2
    assert sides["channels"]["median"] == 1.0
    text = late.table(result)
    assert [row[0] for row in cells(text)] == ["divided", "space", "samples", "channels"]
    words = "the planner picks channels, the fastest of the three"
    assert text.splitlines()[-1] == words
    sides["samples"]["predicted"] = 1.0
    words = "the planner picks samples, which takes 300% longer than channels"
    assert late.picked(sides) == words


@pytest.mark.parametrize(("network", "choice"), [("vgg16", "channels"), ("resnet50", "samples")])
def test_the_planner_divides_dense_layers_by_channels_and_convolutions_of_maps_not(network, choice):
    options = late._parse(["--ranks", "2", "--network", network])
    found = late.predicted(options, cluster_named(cluster_file("infiniband")))
    assert min(found, key=lambda name: found[name]) == choice


def of_bag_memory() -> dict[str, Any]:
    rows = [
        {"tiles": n, "ranks": ranks, "mode": mode, "memory_mb": 100.0 * n / ranks, "seconds": n / 4}
        for n, ranks, mode in product((8, 16), (1, 2), ("slices", "graph"))
    ]
    return {**ABOUT, "options": vars(bag_memory._parse(["--tiles", "8", "16"])), "rows": rows}


def test_memory_over_tiles_has_a_line_for_each_number_of_them():
    rows = cells(bag_memory.table(of_bag_memory()))
    assert [row[0] for row in rows] == ["tiles", "8", "16"]
    assert rows[-1][1:3] == ["1600 MB, 4.0 s", "800 MB, 4.0 s"]
    assert torch.equal(noise(0, 5, 4)[3:], noise(3, 5, 4)), "a tile depends on its number alone"


def of_bag_end_to_end() -> dict[str, Any]:
    curves = {"frozen": [0.5, 0.55], "end_to_end": [0.6, 0.95]}
    rows = [
        {"arm": arm, "seed": seed, "curve": [v + seed / 50 for v in curve], "seconds": 10.0}
        for seed in range(2)
        for arm, curve in curves.items()
    ]
    options = bag_end_to_end._parse(["--seeds", "2", "--epochs", "2"])
    return {**ABOUT, "options": vars(options), "rows": rows}


def test_rare_tiles_have_the_last_accuracy_of_each_seed_and_their_mean():
    *_, last = cells(bag_end_to_end.table(of_bag_end_to_end()))
    assert last == ["end to end", "95.0%", "97.0%", "96.0%", "10"]


def test_arms_differ_in_what_learns_alone(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(bag_end_to_end.worker, "run", lambda command, _: commands.append(command))
    options = bag_end_to_end._parse(["--folder", str(tmp_path)])
    for arm in bag_end_to_end.ARMS:
        with pytest.raises(RuntimeError, match="was interrupted"):
            bag_end_to_end._run(options, arm, 1)
    frozen, learning = (
        {word for word in command if not word.startswith("hydra.run.dir")} for command in commands
    )
    assert frozen - learning == {"trainer.freeze=[encoder.*]"}
    assert learning <= frozen


def step(side: float, **sizes: float) -> dict[str, Any]:
    found = {"fits": True, "seconds": 2 * side, "cpu_seconds": side, "resident_gb": side / 10}
    return {**found, "base_gb": 0.2, "base_data_gb": 0.1, "loss": 2.0, **sizes}


def of_stream() -> dict[str, Any]:
    options = stream._parse(["--sizes", "512", "128", "256", "--small-from", "512", "--tile", "64"])
    stored = dict.fromkeys(("written_gb", "read_gb", "stored_gb", "live_gb"), 1.5)
    refused = {"fits": False, "why": "can't allocate memory"}
    rows: list[dict[str, Any]] = []
    sides = [(128, "float32", 4.0), (256, "float32", None), (128, "bfloat16", 2.0)]
    for size, precision, ideal in [*sides, (512, "bfloat16", None)]:
        runs: list[dict[str, Any]] = []
        for more in (1, 2, 3):
            runs.append({"streamed": step(size / 16 * more, **stored), "limited": refused})
            if ideal:
                runs[-1]["ideal"] = step(ideal * more)
        rows.append({"size": size, "precision": precision, "grid": size // 64, "runs": runs})
    stream.complete(rows)
    largest = [
        {"precision": "float32", "whole": 64, "refused": 96, "streamed": 256},
        {"precision": "bfloat16", "whole": 0, "refused": None, "streamed": 512},
    ]
    return {**ABOUT, "options": vars(options), "rows": rows, "largest": largest}


def test_streamed_images_that_were_not_measured_whole_are_extrapolated_by_pixels():
    """Of the same precision."""
    result = of_stream()
    seconds = [(row["cpu_seconds"], row["ideal"]["cpu_seconds"]) for row in result["rows"]]
    assert seconds == [(16, 8), (32, 32), (16, 4), (64, 64)]
    assert [row["is_measured"] for row in result["rows"]] == [True, False, True, False]
    rows = cells(stream.table(result))
    assert ["256", "4 x 4", "64.0", "~64.0", "1.00"] in [row[:5] for row in rows]
    assert rows[-2:] == [
        ["float32", "64", "96", "256", "16 or more"],
        ["bfloat16", "0", "", "512", ""],
    ]
    assert stream.table(result).count("does not fit") == 4


def test_streamed_steps_that_do_not_compute_the_same_are_refused():
    stream.check_alike(64, "float32", 2.0001, 2.0)
    for other in (2.001, float("nan")):
        with pytest.raises(RuntimeError, match="the loss of 64x64 in float32 is"):
            stream.check_alike(64, "float32", other, 2.0)


def test_the_largest_images_are_found_for_each_precision(monkeypatch):
    def found(_: Any, size: int, precision: str, words: list[str], __: int) -> dict[str, Any]:
        assert words == ["--limit-gb", "2.0"]
        taken = size**2 / (200_000 if precision == "float32" else 400_000)
        return {"fits": taken <= 2, "resident_gb": 1.99, "needed_gb": taken}

    monkeypatch.setattr(stream, "_step", found)
    options = stream._parse(["--sizes", "2048"])
    largest = stream._largest(options, of_stream()["rows"])
    assert [(one["whole"], one["refused"]) for one in largest] == [(576, 640), (832, 896)]
    assert [one["streamed"] for one in largest] == [256, 512]


@pytest.mark.parametrize(
    ("draw", "result"),
    [
        (halo.draw, of_halo),
        (backend.draw, of_backend),
        (late.draw, of_late),
        (bag_memory.draw, of_bag_memory),
        (bag_end_to_end.draw, of_bag_end_to_end),
        (stream_picture.draw, of_stream),
    ],
)
def test_pictures_are_drawn(draw, result, tmp_path):
    draw(result(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000
