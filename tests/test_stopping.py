"""The command as a user starts and stops it: real ranks and signals."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spatialdl.comm.launch import mpiexec_command
from tests.training.checkpoints.runs import TINY, checkpoints, losses, table, train
from tests.vision import import_path

ROOT = Path(__file__).resolve().parent.parent
LONG = ["trainer.max_steps=100000", "data.validation_samples=0"]
SP_PP = ["parallel=sp+pp", "parallel.microbatches=2"]


def command(run_dir: Path, *overrides: str) -> list[str]:
    words = [*TINY, *overrides, "ckpt_path=latest", f"hydra.run.dir={run_dir}"]
    return [sys.executable, "-m", "spatialdl.train", *words]


@contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A run that has made its first step."""
    with subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": import_path(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said = []
            for line in process.stdout:
                said.append(line)
                if " step " in line or "- step 1 of" in line:
                    break
            else:
                pytest.fail("".join(said))
            yield process
        finally:
            process.kill()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks below a launcher."""
    found, todo = [], [process.pid]
    while todo:
        parent = todo.pop()
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        todo += map(int, children)
        words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
        if not children and b"spatialdl.train" in words:
            found.append(parent)
    return sorted(found)


def stopped_at(run_dir: Path) -> int:
    marker = json.loads((run_dir / "stopped.json").read_text())
    assert marker["checkpoint"] == marker["step"] == checkpoints(run_dir)[-1]
    assert not list((run_dir / "checkpoints").glob(".*.tmp"))
    assert not (run_dir / "summary.json").exists()
    why = f"Stopped by {marker['signal']} after step {marker['step']} of "
    assert why in (run_dir / "report.html").read_text()
    return int(marker["step"])


def test_ranks_are_stopped_and_one_process_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    with started(command(run_dir, "parallel=sp", *LONG)) as process:
        process.send_signal(signal.SIGTERM)
        output = process.stdout.read()
        assert process.wait(250) == 0, output
    step = stopped_at(run_dir)
    assert len(table(run_dir / "metrics.csv")) == step
    goes_on(run_dir, step)


def goes_on(run_dir: Path, step: int, *words: str) -> None:
    """In this process, and has the losses of a run that was never stopped."""
    end = ("data.validation_samples=0", f"trainer.max_steps={step + 2}", *words)
    train(run_dir, *end, "ckpt_path=latest")
    assert not (run_dir / "stopped.json").exists()
    train(run_dir.parent / "one", *end)
    assert losses(run_dir) == pytest.approx(losses(run_dir.parent / "one"), abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_one_process_is_stopped(number, tmp_path):
    with started(command(tmp_path, *LONG)) as process:
        process.send_signal(number)
        assert process.wait(250) == 0
    assert stopped_at(tmp_path) >= 1
    assert json.loads((tmp_path / "stopped.json").read_text())["signal"] == number.name


@pytest.mark.slow
@pytest.mark.parametrize("who", ["launcher", "one", "all"])
def test_whoever_is_told_all_ranks_of_mpiexec_stop(who, tmp_path):
    with started([*mpiexec_command(3), *command(tmp_path, *SP_PP, *LONG)]) as process:
        ranks = ranks_of(process)
        assert len(ranks) == 3
        for pid in {"launcher": [process.pid], "one": ranks[1:2], "all": ranks}[who]:
            os.kill(pid, signal.SIGUSR1 if who == "launcher" else signal.SIGTERM)
        output = process.stdout.read()
        assert process.wait(250) == 0, output
    assert stopped_at(tmp_path) >= 1


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(tmp_path):
    with started(command(tmp_path, *SP_PP, *LONG)) as process:
        ranks = [os.pidfd_open(pid) for pid in ranks_of(process)]
        stuck = ranks_of(process)[-1]
        os.kill(stuck, signal.SIGSTOP)  # so that no step ends
        process.send_signal(signal.SIGINT)
        for line in process.stdout:
            if "stopping after this step" in line:
                break
        process.send_signal(signal.SIGINT)
        os.kill(stuck, signal.SIGCONT)
        assert process.wait(250) == 128 + signal.SIGINT
        for rank in ranks:
            assert select.select([rank], [], [], 5)[0], "a rank is still there"
            os.close(rank)


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_the_last_checkpoint(tmp_path):
    often = "trainer.checkpoint.every_steps=1"
    with started(command(tmp_path / "run", *SP_PP, *LONG, often)) as process:
        for line in process.stdout:
            if "checkpoint: " in line and "step-00000004" in line:
                break
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        assert process.wait(250) != 0
    assert not (tmp_path / "run" / "stopped.json").exists()
    goes_on(tmp_path / "run", checkpoints(tmp_path / "run")[-1], "parallel.microbatches=2")
