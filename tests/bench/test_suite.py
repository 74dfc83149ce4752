"""All benchmarks in one go: on the simulated accelerator, as on GPUs."""

from __future__ import annotations

import os
import sys

import pytest
from PIL import Image

from spatialdl.bench import suite
from tests import simulated_device
from tests.comm.programs import run
from tests.simulated_device.autoload import python_path

EVERY = ["spatial", "memory", "synthetic", "halo", "pipeline", "backend"]


def test_one_that_fails_does_not_keep_others_from_running(monkeypatch, tmp_path, capsys):
    started = []

    def bench(arguments):
        started.append(arguments[-1].rpartition("/")[2])
        out = tmp_path / started[-1]
        if started[-1] == "memory":
            raise ValueError("no memory\nat all")
        out.mkdir()
        (out / "x.md").write_text(f"table of {started[-1]}\n")

    for name in EVERY:
        monkeypatch.setattr(getattr(suite, name), "main", bench)
    with pytest.raises(RuntimeError, match=r"1 failed: memory \(no memory\)$"):
        suite.main(["--device", "cpu", "--ranks", "2", "--out", str(tmp_path)])
    assert started == EVERY
    text = (tmp_path / "suite.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("table")] == [
        f"table of {name}" for name in EVERY if name != "memory"
    ]


@pytest.mark.parametrize(("ranks", "names"), [(1, EVERY[:3]), (2, EVERY), (6, EVERY)])
def test_every_benchmark_takes_its_words(ranks, names):
    for quick in ([], ["--quick"]):
        options = suite._parse(["--device", "cpu", "--ranks", str(ranks), *quick])
        found = suite.runs(options)
        assert list(found) == names
        for name, (_, words) in found.items():
            getattr(suite, name)._parse(words)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "devices", "names"), [(2, 2, EVERY), (2, 1, EVERY[:-1])])
def test_everything_runs_on_the_simulated_accelerator(ranks, devices, names, tmp_path):
    """Ranks that share a device have no NCCL that our backend could be compared with."""
    if not simulated_device.available():
        pytest.skip(str(simulated_device.missing()))
    (tmp_path / "path").mkdir()
    path = python_path(tmp_path / "path")
    words = ["--quick", "--ranks", str(ranks), "--out", str(tmp_path)]
    done = run(
        *("-m", "spatialdl.bench", "suite", *words),
        PYTHONPATH=os.pathsep.join([path, *sys.path]),
        SIM_DEVICES=str(devices),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("backend skipped: " in done.stdout) == ("backend" not in names)
    text = (tmp_path / "suite.md").read_text()
    assert [line for line in text.splitlines() if line[:2] == "##"] == [f"## {n}" for n in names]
    assert text.count(", sim, ") == len(names)
    assert "nan" not in text
    for name in names:
        (picture,) = (tmp_path / name).glob("*.png")
        with Image.open(picture) as image:
            assert len(image.convert("RGB").getcolors(100_000)) > 5
