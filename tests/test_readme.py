"""The README keeps its word: its Python runs, its commands are understood, its links hold."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from spatialdl import train
from spatialdl.comm.launch import mpiexec_command
from spatialdl.training.checks import check_config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
CONF = ROOT / "spatialdl" / "conf"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The words of all shell lines that run `program`, from there on."""
    lines = [
        shlex.split(line, comments=True) for block in blocks("sh") for line in block.split("\n")
    ]
    return [line[line.index(program) :] for line in lines if program in line]


def name_of(block: str) -> str:
    """Every block of Python begins with the name of its file."""
    found = re.match(r"# (\w+\.py)\n", block)
    assert found, block
    return found[1]


@pytest.mark.parametrize("block", blocks("python"), ids=name_of)
def test_python_runs(block, tmp_path):
    (tmp_path / name_of(block)).write_text(block)
    together = "init_mesh" in block or "init_process_group" in block
    launcher = mpiexec_command(2) if together else []
    done = subprocess.run(
        [*launcher, sys.executable, name_of(block)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "refusal" in block:
        said = " ".join(next(text for text in blocks("text") if "cannot be done" in text).split())
        assert done.stdout.count(said) == 2


def test_the_network_that_is_checked_is_exact(tmp_path):
    (network,) = (block for block in blocks("python") if name_of(block) == "networks.py")
    (tmp_path / "networks.py").write_text(network)
    (words,) = commands("spatialdl.check")
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to one process" in done.stdout


@pytest.mark.parametrize("words", commands("spatialdl.train"), ids=" ".join)
def test_a_training_command_is_understood(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("tiles", "my_set"):  # which the commands before it have written
        (tmp_path / folder).mkdir()
    (tmp_path / "receptors.csv").touch()
    overrides = [train.rewritten(word) for word in words[1:] if not word.startswith("-")]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        check_config(compose("train", overrides))


def test_there_are_commands():
    assert len(commands("spatialdl.train")) >= 6
    assert len(commands("mpiexec")) >= 3


@pytest.mark.parametrize("group", ["parallel", "model", "optimizer", "data", "task", "logger"])
def test_every_choice_that_is_named_has_a_file_and_the_other_way_round(group):
    named = set(re.findall(rf"(?<![\w.]){group}=([\w+]+)", README))
    there = {path.stem for path in (CONF / group).glob("*.yaml")}
    assert named <= there
    if group in ("parallel", "model", "optimizer", "task"):
        assert named == there


def test_every_file_that_is_linked_is_there():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_that_are_named_are_there():
    targets = set(re.findall(r"\bmake (\w+)\b", README))
    rules = (ROOT / "Makefile").read_text()
    assert {"demo", "test"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", rules, re.M)] == []
