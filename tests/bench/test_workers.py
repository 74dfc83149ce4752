"""The side of a benchmark that trains: the same images on every side, whatever its tile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

import spatialdl
from spatialdl.bench import overhead, slow_source, stream_worker, tiling_worker, worker
from spatialdl.bench.slow_source import SlowSource
from spatialdl.bench.slow_source import environment as slow_environment
from spatialdl.bench.tiling import HASHED, NATIVE, OPENSLIDE, OURS, PASSED, THROUGH
from spatialdl.comm.mesh import dry_mesh
from spatialdl.planning.worker import environment, run_worker
from spatialdl.slides import command
from spatialdl.slides.synthetic.drawing import write_synthetic_slide
from spatialdl.spatial import SpatialTensor


@pytest.mark.parametrize(
    ("model", "grid", "shape"),
    [
        ("resnet18", (2, 2), (1, 3, 9, 9)),
        ("unet", (1, 3), (1, 3, 9, 9)),
        ("unet3d", (2, 1, 3), (1, 1, 9, 9, 9)),
        (worker.CONVOLUTIONS, (3, 1), (1, 64, 9, 9)),
    ],
)
def test_tiles_are_those_of_the_whole_image(model, grid, shape):
    options, cpu = Namespace(model=model, size=9, batch=1), torch.device("cpu")
    whole, labels = worker._images(options, None, cpu), worker._labels(options, None, cpu)
    assert whole.shape == shape
    assert labels.shape == ((1, *shape[2:]) if model.startswith("unet") else (1,))
    for part in range(4):
        mesh = dry_mesh(grid, part % torch.Size(grid).numel())
        bounds = mesh.box(shape[2:])
        own = [slice(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]
        tile = worker._images(options, mesh, cpu)
        assert isinstance(tile, spatialdl.SpatialTensor)
        assert torch.equal(tile.to_local(), whole[(..., *own)])
        assert worker._labels(options, mesh, cpu).shape == labels.shape


def test_the_stack_of_convolutions_is_halved_once():
    model = worker.convolutions(5)
    assert model[:8](torch.zeros(1, 64, 12, 10)).shape == (1, 64, 6, 5)
    assert model(torch.zeros(2, 64, 12, 10)).shape == (2, 5)


@pytest.mark.parametrize(
    ("model", "name"),
    [("resnet18", "resnet18"), ("a/b.c/net.py:build", "build"), ("library.nets.Net", "Net")],
)
def test_a_result_is_named_after_the_network(model, name):
    assert worker.name_of(model) == name


def test_a_network_may_be_that_of_others(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n\n\ndef net(num_classes):\n    return nn.Linear(3, num_classes)\n"
    )
    options = Namespace(model=f"{file}:net", recompute=False, ddp=False)
    network = worker._network(options, torch.device("cpu"))
    assert network.out_features == worker.CLASSES


def streamed_step(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "spatialdl.bench.stream_worker", "--size", "1024", *words]
    return run_worker(command, environment(1))


@pytest.mark.slow
def test_within_a_limit_a_streamed_step_fits_and_that_of_the_whole_image_does_not(
    tmp_path: Any,
) -> None:
    limit = ["--limit-gb", "0.65"]
    grid = ["--grid", "2", "--live-gb", "0.1", "--store", str(tmp_path)]
    streamed, refused, whole = streamed_step(*limit, *grid), streamed_step(*limit), streamed_step()
    assert not refused["fits"]
    assert "can't allocate memory" in refused["why"]
    assert streamed["fits"]
    assert streamed["resident_gb"] < 0.65 + 0.1  # and libraries
    assert whole["needed_gb"] == whole["resident_gb"] > 0.8
    assert streamed["written_gb"] > 0.3
    assert abs(streamed["loss"] - whole["loss"]) < 1e-5


def test_parts_of_a_picture_are_those_of_the_whole() -> None:
    picture = stream_worker.Picture(5000, torch.device("cpu"))
    whole = picture[:, :, 4000:, 4500:]
    assert whole.shape == (1, 3, 1000, 500)
    assert torch.equal(picture[:, :, 4100:4200, 4600:4601], whole[:, :, 100:200, 100:101])
    assert 0 <= float(whole.min()) < 0.01
    assert 0.99 < float(whole.max()) < 1
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_what_lacks_memory_is_known_from_other_failures() -> None:
    assert stream_worker.lacks_memory(MemoryError())
    assert stream_worker.lacks_memory(RuntimeError("could not create a primitive"))
    assert not stream_worker.lacks_memory(RuntimeError("shape '[1]' is invalid"))


READS = """
import os, sys
for path in sys.argv[1:]:
    file = os.open(path, os.O_RDONLY)
    assert os.preadv(file, [bytearray(3000)], 1000) == 3000
"""


def test_the_rate_is_shared(tmp_path):
    rate = 20e6
    began = time.monotonic()

    def read() -> None:
        SlowSource(str(tmp_path / "state"), rate).serve(2_500_000)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 5_000_000 / rate - slow_source._IDLE_S
    assert SlowSource(str(tmp_path / "state"), rate).served() == 5_000_000


def test_processes_read_the_folder_slowly_and_others_not(tmp_path):
    for name in ("set", "settled", "work"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(4000))
    (tmp_path / "link").symlink_to(tmp_path / "set")
    server, slow = slow_environment(tmp_path / "link", 1e6, tmp_path / "work")
    assert server.served() == 0
    paths = [str(tmp_path / name / "file") for name in ("set", "settled", "link")]
    for _ in range(2):
        command = [sys.executable, "-c", READS, *paths]
        subprocess.run(command, env={**os.environ, **slow}, check=True)
    assert server.served() == 2 * 2 * 3000


def test_a_copy_of_the_hook_elsewhere_does_nothing(tmp_path):
    installed = []
    slow_source._start({}, lambda **given: installed.append(given))
    assert not installed
    (tmp_path / "work").mkdir()
    _, slow = slow_environment(tmp_path, 5.0, tmp_path / "work")
    slow_source._start(slow, lambda **given: installed.append(given))
    assert installed[0]["rate"] == pytest.approx(5.0)


class Seen(nn.Module):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.inputs: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs.append(x)
        return self.norm(self.conv(x)).relu().mean((2, 3))


@pytest.mark.parametrize(("ranks", "whole"), [(1, (8, 8)), (2, (16, 8)), (4, (16, 16))])
def test_sides_alternate_on_a_tile_of_the_same_size(ranks, whole):
    network = Seen()
    plain, split = overhead.compare(network, ranks, size=8, batch=2, rounds=2)
    assert len(plain) == len(split) == 2
    tiles, images = network.inputs[::2], network.inputs[1::2]
    assert all(type(one) is torch.Tensor and one.shape == (2, 3, 8, 8) for one in tiles)
    for one in images:
        assert isinstance(one, SpatialTensor)
        assert one.shape == (2, 3, *whole)
        assert one.to_local().shape == (2, 3, 8, 8)


def test_a_network_of_small_operations_is_the_same_on_one_rank():
    torch.manual_seed(0)
    network = overhead.efficientnet_b0(num_classes=3).eval()
    images = torch.randn(2, 3, 64, 64)
    split = spatialdl.shard(images, spatialdl.init_mesh((1, 1)))
    assert torch.equal(network(split), network(images))


def test_the_table(capsys):
    overhead.main(["--size", "32", "--batch", "2", "--rounds", "1", "--ranks", "1"])
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line.split()[:2] for line in lines] == [[name, "1"] for name in overhead.NETWORKS]
    with pytest.raises(ValueError, match="at least 1"):
        overhead.main(["--rounds", "0"])


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "slide.tiff"
    write_synthetic_slide(path, "ring", (1024, 1280), seed=1)
    return path


def tiles(slide: Path, way: str, most: int, capsys: pytest.CaptureFixture[str]) -> int:
    given = ["--tile-size", "256", "--most", str(most), "--out", str(slide.parent / "set")]
    tiling_worker.main([way, str(slide), *given])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["cpu_seconds"] > 0
    assert not (slide.parent / "set").exists()
    return int(found["tiles"])


def test_every_way_counts_its_tiles(
    slide: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], bool]] = []
    main = command.main

    def told(given: list[str], *, native: bool) -> int:
        asked.append((given, native))
        return main(given, native=native)

    monkeypatch.setattr(command, "main", told)
    for way in (OPENSLIDE, NATIVE):
        assert [tiles(slide, way, most, capsys) for most in (5, 7, 100)] == [5, 7, 20]
    cut = tiles(slide, OURS, 100, capsys)
    assert 1 <= cut <= 20
    assert [tiles(slide, way, 100, capsys) for way in (THROUGH, PASSED)] == [cut, cut]
    assert [native for _, native in asked] == [True, False, True]
    assert "jpeg-native" in asked[2][0]
    assert tiles(slide, HASHED, 7, capsys) == 7


def test_a_slide_without_native_tiles_is_no_measure_of_them(tmp_path: Path) -> None:
    path = tmp_path / "a.tiff"
    tifffile.imwrite(path, np.zeros((300, 300, 3), np.uint8), tile=(256, 256), photometric="rgb")
    given = ["--tile-size", "64", "--most", "1", "--out", "unused"]
    with pytest.raises(RuntimeError, match="are not read natively"):
        tiling_worker.main([NATIVE, str(path), *given])
