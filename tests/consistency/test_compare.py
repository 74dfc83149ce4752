"""Real ranks that were started with different things."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import spatialdl
from spatialdl.comm.launch import mpiexec_command
from spatialdl.consistency.compare import ranks_and_hosts
from spatialdl.data import ShardWriter
from tests.predicting.runs import NETWORK, train, write_slide
from tests.vision import import_path

HOST = socket.gethostname()
NETWORKS = """
from torch import nn
def network(num_classes, in_channels):
    return nn.Sequential(nn.Conv2d(in_channels, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(2, num_classes))
"""
SMALL = [
    *("parallel=dp", "model._target_=networks.network", "~model.width", "data.batch_size=2"),
    *("trainer.max_steps=1", "device=cpu", "hydra.run.dir=run", "data=shards"),
    "data.path=${oc.env:SET}",
]


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """Of each rank, with a data set and a network of the user's."""
    draw = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "networks.py").write_text(NETWORKS)
    with ShardWriter(tmp_path / "a" / "set", ("no", "yes")) as writer:
        for number in range(4):
            writer.add(draw.integers(0, 256, (8, 8, 3), np.uint8), number % 2, "train")
    shutil.copytree(tmp_path / "a" / "set", tmp_path / "b" / "set")
    return tmp_path / "a", tmp_path / "b"


@pytest.fixture
def start(folders, tmp_path):
    """Starts two ranks, each with overrides of its own, and its folder first on the path."""

    def run(*overrides: list[str], command: str = "train") -> subprocess.CompletedProcess[str]:
        words: list[str] = []
        for folder, own in zip(folders, overrides, strict=True):
            path = import_path(folder, Path(spatialdl.__file__).parents[1])
            found = [f"PYTHONPATH={path}", f"SET={folder / 'set'}"]
            program = [sys.executable, "-m", f"spatialdl.{command}"]
            launcher = [":", "-n", "1"] if words else mpiexec_command(1)
            words += [*launcher, "env", *found, *program, *own]
        return subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )

    return run


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """What was said, once, and by rank 0."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    [line] = [one for one in done.stderr.splitlines() if "ranks differ" in one]
    assert line.startswith(f"rank 0 on {HOST}: ")
    return line.partition(": ")[2]


def each(one: str, other: str) -> str:
    return f"{one} on rank 0 ({HOST}), {other} on rank 1 ({HOST})"


def test_all_that_differs_is_told_before_there_is_a_run_directory(start, folders, tmp_path):
    _, folder = folders
    shutil.copytree(
        Path(spatialdl.__file__).parent,
        folder / "spatialdl",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    with (folder / "spatialdl" / "parallel" / "layout.py").open("a") as file:
        file.write("# as another branch has it\n")
    (folder / "networks.py").write_text(NETWORKS.replace("2, 3", "3, 3"))
    (folder / "scipy-0.9.dist-info").mkdir()
    (folder / "scipy-0.9.dist-info" / "METADATA").write_text("Name: scipy\nVersion: 0.9\n")
    with (folder / "set" / "manifest.json").open("a") as file:
        file.write("\n")
    text = refused(start([*SMALL, "seed=3"], [*SMALL, "seed=4", "optimizer.lr=0.5"]))
    assert (
        f"configuration: seed is {each('3', '4')}, optimizer.lr is {each('0.05', '0.5')}: " in text
    )
    assert f", 0.9 on rank 1 ({HOST}): start all ranks in the same environment" in text
    code = text.partition("code: ")[2].partition("files: ")[0]
    assert code.count(" is ") == 2
    assert "spatialdl/parallel/layout.py is " in code
    assert "networks.network in networks.py is " in code
    assert f"rank 1 has {folder / 'spatialdl'})" in code
    assert "files: manifest.json of data.path is " in text
    assert f"rank 1 has {folder / 'set' / 'manifest.json'})" in text
    assert not (tmp_path / "run").exists()


def test_the_same_data_in_different_places_are_the_same(start, tmp_path):
    done = start(SMALL, SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "summary.json").exists()


def test_ranks_of_torch_distributed_are_compared_too(start):
    torch = [*SMALL, "comm.transport=torch"]
    text = refused(start([*torch, "hydra.run.dir=a"], [*torch, "hydra.run.dir=b"]))
    assert text == (
        f"ranks differ: configuration: hydra.run.dir is {each('a', 'b')}: give all "
        "ranks the same overrides"
    )


@pytest.mark.slow
@pytest.mark.parametrize("address", [False, True])
def test_ranks_with_different_transports_do_not_wait_for_each_other(start, address, monkeypatch):
    if address:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29417")
    text = refused(start([*SMALL, "comm.transport=torch"], [*SMALL, "comm.transport=mpi"]))
    assert "comm.transport is torch on rank 0, mpi on rank 1: give all ranks the same" in text


def test_predicting_needs_the_same_network_everywhere(start, folders, tmp_path):
    write_slide(tmp_path / "slide.tif", 200, 260, seed=0)
    for folder, seed in zip(folders, "01", strict=True):
        train(folder / "set" / "run", *NETWORK, f"seed={seed}")
    words = ["slides=slide.tif", "ckpt_path=${oc.env:SET}/run", "parallel=dp", "device=cpu"]
    text = refused(start(words, words, command="predict"))
    assert "files: checkpoint.json of ckpt_path is " in text
    assert "configuration" not in text


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([2], "rank 2 (b)"),
        ([0, 1, 3], "ranks 0-1 (a), 3 (b)"),
        ([0, 1, 2, 3], "ranks 0-1 (a), 2-3 (b)"),
        (list(range(12)), "ranks 0-1 (a), 2-3 (b), 4-5 (c), 6-7 (d), and 4 more"),
    ],
)
def test_ranks_are_told_with_their_hosts(ranks, said):
    assert ranks_and_hosts(ranks, list("aabbccddeeff")) == said
