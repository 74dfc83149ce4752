"""What a rank says of itself, and real ranks that were started with different things."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import spatialdl
from spatialdl.cli.rank_state import (
    code,
    configuration,
    prediction_files,
    training_files,
    versions,
)
from spatialdl.cli.start import without_hydra
from spatialdl.comm.launch import mpiexec_command
from spatialdl.data import ShardWriter
from tests.composing import compose_anew
from tests.inference.predicting.runs import NETWORK, train, write_slide
from tests.processes import ended
from tests.vision import import_path

composed = partial(compose_anew, "train", with_hydra=True)


def differing(*sets: dict[str, str]) -> set[str]:
    one, other = sets
    return {key for key in {*one, *other} if one.get(key) != other.get(key)}


def test_a_configuration_differs_where_its_keys_do():
    plain = configuration(composed()).items
    assert plain["seed"] == "0"
    assert plain["hydra.run.dir"] == "${new_folder:outputs/${now:%Y-%m-%d_%H-%M-%S}}"
    assert not any(key.startswith("hydra.") for key in {*plain} - {"hydra.run.dir"})
    changed = configuration(composed("seed=1", "data.image_size=[9,8]", "+data.extra={}")).items
    assert differing(plain, changed) == {"seed", "data.image_size", "data.extra"}


def test_what_the_environment_puts_in_differs_unless_it_is_a_place(monkeypatch):
    words = [
        *("seed=${oc.env:HERE}", "optimizer.lr=${seed}", "data.image_size=['${oc.env:HERE}',9]"),
        *("data=shards", "data.path=${oc.env:HERE}", "+data.name_of_run=${hydra:job.num}"),
        *("logger=wandb", "logger.wandb.name=${now:%f}", "logger.wandb.project=${oc.env:HERE}"),
    ]
    found = []
    for value in "12":
        monkeypatch.setenv("HERE", value)
        found.append(configuration(composed(*words)).items)
    assert differing(*found) == {"seed", "optimizer.lr", "data.image_size"}
    assert found[0]["seed"] == "${oc.env:HERE} = 1"
    assert found[0]["data.path"] == "${oc.env:HERE}"


def test_code_is_that_of_the_package_and_of_what_the_configuration_names(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    target = "sameness_networks.Network"
    config = without_hydra(composed("model=resnet18", f"model._target_={target}"))
    file = tmp_path / "sameness_networks.py"
    assert code(config).items[target].startswith("not importable (No module named")
    file.write_text("__version__ = '3.1'\nclass Network: ...\n")
    before = code(config).items
    assert before["sameness_networks"] == "3.1"
    assert len(before["spatialdl/spatial/conv.py"]) == 12
    file.write_text("class Network:\n    depth = 2\n__version__ = '3.1'\n")
    assert differing(before, code(config).items) == {f"{target} in {file.name}"}
    del sys.modules["sameness_networks"]


def test_code_that_lists_name_is_compared_and_that_behind_a_link_in_a_clone():
    listed = "tests.training.own_callbacks.Recorder"
    found = code(without_hydra(composed(f"trainer.callbacks=[{{_target_: {listed}}}]"))).items
    assert f"{listed} in own_callbacks.py" in found
    assert "spatialdl/conf/__init__.py" in found


def test_versions_are_those_in_use():
    found = versions().items
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__, "with the build, which metadata may leave out"
    assert found["h5py"] != "missing"


def test_files_are_known_by_what_is_in_them(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")

    config = composed("data=shards", "data.path=a")

    def files(name: str) -> dict[str, str]:
        config.data.path = str(tmp_path / name)
        return dict(training_files(config).items)

    assert files("a") == files("b")
    (tmp_path / "b" / "manifest.json").write_text("{ }")
    assert files("a") != files("b")
    assert files("c") == {"manifest.json of data.path": "not readable (No such file or directory)"}
    assert training_files(composed()).items == {}


def test_a_prediction_has_the_checkpoint_and_the_manifest(tmp_path):
    whole = tmp_path / "run" / "checkpoints" / "step-00000003"
    whole.mkdir(parents=True)
    (whole / "checkpoint.json").write_text("{}")
    (tmp_path / "manifest.json").write_text("{}")
    words = [f"ckpt_path={tmp_path}/run", f"shards={tmp_path}"]
    found = prediction_files(compose_anew("predict", *words))
    assert {*found.items} == {"checkpoint.json of ckpt_path", "manifest.json of shards"}
    assert len(set(found.items.values())) == 1


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
        return ended(words, tmp_path)

    return run


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """What was said, once, and by rank 0."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    [line] = [one for one in done.stderr.splitlines() if "ranks differ" in one]
    assert line.startswith(f"rank 0 on {HOST}: ")
    return line.partition(": ")[2]


def each(one: str, other: str) -> str:
    return f"{one} on rank 0, {other} on rank 1"


def test_all_that_differs_is_told_before_there_is_a_run_directory(start, folders, tmp_path):
    _, folder = folders
    shutil.copytree(
        Path(spatialdl.__file__).parent,
        folder / "spatialdl",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    with (folder / "spatialdl" / "layout" / "layout.py").open("a") as file:
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
    assert ", 0.9 on rank 1: start all ranks in the same environment" in text
    code = text.partition("code: ")[2].partition("files: ")[0]
    assert code.count(" is ") == 2
    assert "spatialdl/layout/layout.py is " in code
    assert "networks.network in networks.py is " in code
    assert "files: manifest.json of data.path is " in text
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_same_data_in_different_places_are_the_same(start, tmp_path):
    done = start(SMALL, SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_predicting_needs_the_same_network_everywhere(start, folders, tmp_path):
    write_slide(tmp_path / "slide.tif", 200, 260, seed=0)
    for folder, seed in zip(folders, "01", strict=True):
        train(folder / "set" / "run", *NETWORK, f"seed={seed}")
    words = ["slides=slide.tif", "ckpt_path=${oc.env:SET}/run", "parallel=dp", "device=cpu"]
    text = refused(start(words, words, command="predict"))
    assert "files: checkpoint.json of ckpt_path is " in text
    assert "configuration" not in text
