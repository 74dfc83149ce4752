"""Signals that come while a command still imports: real processes, held by a FIFO."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spatialdl.comm import early_signals
from spatialdl.comm.launch import mpiexec_command
from tests.comm.programs import ROOT, environment, run
from tests.comm.running import FOR_EVER, by_itself
from tests.test_stopping import SP_PP, stopped_at

# the first that the command imports which is not Python's; it waits in one of the processes
HOLDING = """
import os, sys
if os.environ.get("OMPI_COMM_WORLD_RANK", "") == os.environ["HELD"]:
    with open("here", "w") as here:
        here.write(str(os.getpid()))
    with open("go") as go:
        go.read(1)
sys.path.remove(os.environ["HOLDING"])
del sys.modules["hydra"]
import hydra
"""


def command(run_dir: Path, *words: str) -> list[str]:
    return [*by_itself(), *FOR_EVER, *words, f"hydra.run.dir={run_dir}"]


@contextmanager
def importing(folder: Path, words: list[str], held: str = "") -> Iterator[subprocess.Popen[str]]:
    """A command of which one process has begun to import; `go` lets it."""
    holding = folder / "holding"
    (holding / "hydra").mkdir(parents=True)
    (holding / "hydra" / "__init__.py").write_text(HOLDING)
    for name in ("here", "go"):
        os.mkfifo(folder / name)
    letting_go = os.open(folder / "go", os.O_RDWR)  # which waits for nobody
    path = os.pathsep.join([str(holding), str(ROOT), *sys.path])
    with subprocess.Popen(
        words,
        cwd=folder,
        env=environment(HOLDING=str(holding), HELD=held, PYTHONPATH=path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            os.close(letting_go)
            process.kill()


def is_held(folder: Path) -> int:
    """Wait until the process has got there; its number."""
    return int((folder / "here").read_text())


def go(folder: Path) -> None:
    (folder / "go").write_text("x")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], SP_PP], ids=["one process", "ranks"])
def test_a_run_whose_time_is_over_as_it_starts_leaves_a_checkpoint(layout, tmp_path):
    with importing(tmp_path, command(tmp_path / "run", *layout)) as process:
        os.kill(is_held(tmp_path), signal.SIGUSR1)
        go(tmp_path)
        output = process.stdout.read()
        assert process.wait(60) == 0, output
    assert stopped_at(tmp_path / "run") >= 1
    assert json.loads((tmp_path / "run" / "stopped.json").read_text())["signal"] == "SIGUSR1"


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_a_run_that_is_ended_as_it_starts_begins_nothing(number, code, tmp_path):
    with importing(tmp_path, command(tmp_path / "run")) as process:
        os.kill(is_held(tmp_path), number)
        go(tmp_path)
        assert process.stdout.read() == f"stopped by {number.name}\n"
        assert process.wait(60) == code
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", early_signals.STOPPING, ids=lambda one: one.name)
def test_a_rank_that_is_told_as_it_starts_stops_all(number, tmp_path):
    words = [*mpiexec_command(3), *command(tmp_path / "run", *SP_PP)]
    with importing(tmp_path, words, held="1") as process:
        os.kill(is_held(tmp_path), number)
        go(tmp_path)
        output = process.stdout.read()
        code = process.wait(60)
    if number != signal.SIGUSR1:
        assert code == 128 + number, output
        assert f"stopped by {number.name} before the first step" in output
        return
    assert code == 0, output
    assert stopped_at(tmp_path / "run") >= 1
    assert json.loads((tmp_path / "run" / "stopped.json").read_text())["signal"] == number.name


TAKING = """
import signal
from spatialdl.comm import early_signals
early_signals.keep()
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.raise_signal(number)
assert early_signals.take() == [signal.SIGUSR1, signal.SIGTERM]
assert early_signals.take() == []
for number in (signal.SIGUSR1, signal.SIGINT):
    signal.raise_signal(number)
try:
    early_signals.let_end()
except early_signals.Stopped as stop:
    print(stop, stop.code)
assert early_signals.take() == [signal.SIGUSR1, signal.SIGINT]
signal.raise_signal(signal.SIGUSR1)
from spatialdl.training import signals
signals.install()
assert signals.flags() == [0, 0, 1], "a run leaves a checkpoint"
"""


def test_what_is_kept_is_taken_once():
    """In a process of its own: one of pytest may have run what listens to signals for ever."""
    done = run("-c", TAKING)
    assert (done.returncode, done.stdout) == (0, "stopped by SIGINT 130\n"), done.stderr
