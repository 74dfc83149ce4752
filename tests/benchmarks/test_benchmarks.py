"""What each benchmark refuses, and makes of its measurements; and that each runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest
import torch

from benchmarks import io_worker, layouts, memory, spatial, stream
from spatialdl.comm.mesh import dry_mesh
from tests import simulated_device
from tests.comm.programs import run
from tests.simulated_device import python_path


@pytest.mark.parametrize(
    ("bench", "words", "text"),
    [
        ("accuracy", "tiles --slides 7", "at least 8"),
        ("communication", "--grid 1 1", "no halo"),
        ("io", "--steps 4", "more than the 4 skipped"),
        ("layouts", "parallel=pp data.batch_sise=4", "nearest: data.batch_size"),
        ("layouts", "debug=overfit", "debug=overfit is not supported"),
        ("layouts", "model=glob(res*)", "list the choices"),
        ("layouts", "--set stages model=unet,vit", "one value"),
        ("memory", "--limit 0", "more than 0"),
        ("spatial", "--ddp --batch 3", "cannot be shared"),
        ("stream", "--live-gb 3", "below --limit-gb"),
        ("tiling", "--side 512", "smaller than a tile of 1024"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    bench, words, text, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, SystemExit)) as refused:
        import_module(f"benchmarks.{bench}").main(words.split())
    assert text in str(refused.value) + capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ranks_are_compared_with_all_others_round_by_round(monkeypatch, tmp_path, capsys):
    seconds = {"plain": [2.0, 4.0, 2.0], "one": [1.0, 3.0, 2.0], "ranks": [1.5] * 3}
    started: list[str] = []

    def run_ranks(name, options, ranks=1, *, threads, plain=False):
        assert options.grid == (None if ranks == 1 or options.ddp else (2, 1))
        kind = "plain" if plain else "one" if ranks == 1 else "ranks"
        started.append(options.ddp or kind)
        taken = seconds[kind][(len(started) - 1) // 5]
        found = {"seconds": [taken, 9.0, 0.5], "cpu_seconds": 2 * taken, "memory_mb": 100.0}
        return {**found, "device": "CPU"}

    monkeypatch.setattr(spatial, "run_ranks", run_ranks)
    words = ["--rounds", "3", "--batch", "4", "--ddp", "gloo", "--plain-ranks"]
    spatial.main([*words, "--out", str(tmp_path)])
    assert started[:5] == ["plain", "one", "gloo", "plain", "ranks"]
    result = json.loads((tmp_path / "spatial-resnet18-1024-2ranks.json").read_text())
    assert result["ratio"]["plain PyTorch"]["seconds"] == 0.75  # of 0.75, 0.375 and 0.75
    assert result["ratio"]["one process"]["cpu_seconds"] == 0.75  # of 1.5, 0.5 and 0.75
    assert "speed of 2 ranks: 1.33 of plain PyTorch, 1.33 of one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "grid", "shape"),
    [("unet3d", (2, 1, 3), (1, 1, 9, 9, 9)), (spatial.CONVOLUTIONS, (3, 2), (1, 64, 9, 9))],
)
def test_tiles_are_those_of_the_whole_image(model, grid, shape):
    options, cpu = Namespace(model=model, size=9, batch=1, silent=False), torch.device("cpu")
    whole, labels = spatial._images(options, None, cpu), spatial._labels(options, None, cpu)
    assert whole.shape == shape
    for part in range(torch.Size(grid).numel()):
        mesh = dry_mesh(grid, part)
        bounds = mesh.box(shape[2:])
        own = [slice(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]
        tile = spatial._images(options, mesh, cpu)
        assert torch.equal(tile.to_local(), whole[(..., *own)])
        assert spatial._labels(options, mesh, cpu).shape == labels.shape


@pytest.mark.parametrize("largest", [128, 448, 1984, 5056])
@pytest.mark.parametrize("constant", [0, 200])
def test_the_search_ends_at_the_largest_side_that_fits(largest, constant):
    asked: list[int] = []

    def measure(side: int) -> float | None:
        assert side not in asked
        asked.append(side)
        found = constant + (1500 - constant) * (side / (largest + 32)) ** 2
        return found if found <= 1500 else None

    assert memory.search(measure, 1500, 8192) == largest
    assert len(asked) <= 12
    assert memory.search(lambda side: None, 100, 2048) == 0
    assert memory.search(lambda side: 1.0, 100, 2050) == 2048


def test_keys_with_several_values_make_a_configuration_each():
    keys = ["model=resnet18", "data.batch_size=4,2", "parallel=none,sp"]
    sides = layouts.sides_of(Namespace(keys=keys, set="", only=None))
    assert [side.name for side in sides] == [
        f"data.batch_size={n} parallel={name}" for n in (4, 2) for name in ("none", "sp")
    ]
    for name, listed in layouts.SETS.items():
        sides = layouts.sides_of(Namespace(keys=["device=cpu"], set=name, only=None))
        assert [side.name for side in sides] == list(listed)
        assert all(side.placement.world_size <= 3 for side in sides)


def test_rounds_of_all_turns_are_put_together():
    def one(*rounds: float, ideal: float = 0.0):
        found = {"rounds": rounds, "images": 8, "ranks": 2, "memory_mb": 9.0, "held": 3}
        return {**found, "ideal": [(ideal, 1.0)] * bool(ideal)}

    runs = {"a": [one(2.0, 2.0), one(4.0, 4.0)], "b": [one(1.0, 1.0, ideal=0.5)] * 2}
    sides = layouts.summarise(runs, steps=4)
    assert sides["a"]["rounds"] == [16.0, 16.0, 8.0, 8.0]  # images: 8 of 4 steps, over the seconds
    assert sides["a"]["spread"] == pytest.approx(1.96 * (64 / 3) ** 0.5)
    assert (sides["b"]["ratio"], sides["b"]["total"], sides["b"]["reached"]) == (3.0, 32.0, 0.5)
    for side, seconds in zip(sides.values(), (0.5, 0.2), strict=True):
        side["predicted"] = {"seconds": seconds, "memory_mb": 10.0}
    text = "\n".join(layouts.table({"sides": sides, "options": {"steps": 4}}))
    assert "memory within 10%: 0 of 2; time within 20%: 2 of 2" in text


def test_parts_of_a_picture_are_those_of_the_whole_and_lack_of_memory_is_known():
    picture = stream.Picture(5000, torch.device("cpu"))
    whole = picture[:, :, 4000:, 4500:]
    assert torch.equal(picture[:, :, 4100:4200, 4600:4601], whole[:, :, 100:200, 100:101])
    assert stream.lacks_memory(RuntimeError("could not create a primitive"))
    assert not stream.lacks_memory(RuntimeError("shape '[1]' is invalid"))


READS = "import os, sys; os.preadv(os.open(sys.argv[1], os.O_RDONLY), [bytearray(3000)], 1000)"


def test_processes_share_the_rate_of_a_slow_folder(tmp_path):
    for name in ("set", "settled", "work"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(4000))
    server, slow = io_worker.slow_environment(tmp_path / "set", 20e6, tmp_path / "work")
    for name in ("set", "settled"):
        command = [sys.executable, "-c", READS, str(tmp_path / name / "file")]
        subprocess.run(command, env={**os.environ, **slow}, check=True)
    assert server.served() == 3000  # of the folder, not of others
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(server.serve, [2_500_000] * 2))
    assert time.monotonic() - began >= 5_000_000 / 20e6 - io_worker._IDLE_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("accuracy", "bags --seeds 1 --epochs 1 --slides 8 --validation 2 --folder FOLDER"),
        ("analysis", "--ranks 1 2 --rows 2000 --width 32 --rounds 1"),
        ("communication", "--grid 1 2 --channels 4 --side 16 --rounds 3 --most 1024 DEVICE"),
        ("io", "--side 1100 --boxes 3 --rounds 1 --tile 40 --compute 0.01 --steps 6 --skip 2 "
         "--workers 0 --epoch 6 --shard 40K --written 20 --giant 3000"),
        ("layouts", "model=resnet18 data.image_size=[64,64] data.batch_size=4 parallel=sp,pp "
         "--steps 1 --rounds 2 device=auto comm.ranks_per_device=2"),
        ("memory", "--limit 150 --size 64 --largest 64 --ranks 2 DEVICE"),
        ("memory", "--tiles 2 --ranks 1 2 --slice 2 --side 32"),
        ("scaling", "--most 2"),
        ("spatial", "--size 64 --batch 2 --steps 2 --rounds 1 --ddp DEVICE"),
        ("spatial", "--size 32 --batch 2 --steps 2 --rounds 1 --silent"),
        ("stream", "--sizes 1024 --tile 512 --limit-gb 0.75 --live-gb 0.1 --folder FOLDER"),
        ("tiling", "--side 1024 --rounds 1 --most 10"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("devices", [0, 1, 2])
def test_the_benchmark_runs(name, words, devices, tmp_path):
    """Also on the simulated accelerator, where several devices are worth it."""
    variables = {}
    if devices and (not simulated_device.available() or "DEVICE" not in words.upper()):
        pytest.skip("no device, or the benchmark needs none")
    if devices:
        (tmp_path / "path").mkdir()
        path = os.pathsep.join([python_path(tmp_path / "path"), *sys.path])
        variables = {"PYTHONPATH": path, "SIM_DEVICES": str(devices)}
    words = words.replace("FOLDER", str(tmp_path / "kept")).replace("DEVICE", "--device auto")
    done = run("-m", f"benchmarks.{name}", *words.split(), "--out", str(tmp_path), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (", sim, " in done.stdout) == bool(devices)
    assert "nan" not in done.stdout
    assert list(tmp_path.glob("*.png"))
