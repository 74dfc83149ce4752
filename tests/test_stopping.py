"""The command as a user starts and stops it: real ranks and signals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.comm.running import Run, by_itself, by_mpiexec, running
from tests.training.checkpoints.runs import checkpoints, losses, table, train

SP_PP = ["parallel=sp+pp", "parallel.microbatches=2", "ckpt_path=latest"]


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
    with running(by_itself(), run_dir, "parallel=sp") as run:
        run.process.send_signal(signal.SIGTERM)
        ends_well(run)
    step = stopped_at(run_dir)
    assert len(table(run_dir / "metrics.csv")) == step
    goes_on(run_dir, step)


def ends_well(run: Run) -> None:
    said = run.process.communicate(timeout=250)[0]
    assert run.process.returncode == 0, said


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
    with running(by_itself(), tmp_path) as run:
        run.process.send_signal(number)
        ends_well(run)
    assert stopped_at(tmp_path) >= 1
    assert json.loads((tmp_path / "stopped.json").read_text())["signal"] == number.name


@pytest.mark.slow
@pytest.mark.parametrize("who", ["launcher", "one", "all"])
def test_whoever_is_told_all_ranks_of_mpiexec_stop(who, tmp_path):
    with running(by_mpiexec(3), tmp_path, *SP_PP) as run:
        ranks = [run.ranks[rank] for rank in range(3)]
        for pid in {"launcher": [run.process.pid], "one": ranks[1:2], "all": ranks}[who]:
            os.kill(pid, signal.SIGUSR1 if who == "launcher" else signal.SIGTERM)
        ends_well(run)
    assert stopped_at(tmp_path) >= 1


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(tmp_path):
    with running(by_itself(), tmp_path, *SP_PP) as run:
        run.send(2, signal.SIGSTOP)  # so that no step ends
        run.process.send_signal(signal.SIGINT)
        for line in run.process.stdout:
            if "stopping after this step" in line:
                break
        run.process.send_signal(signal.SIGINT)
        run.send(2, signal.SIGCONT)
        run.end()
        assert run.process.returncode == 128 + signal.SIGINT


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_the_last_checkpoint(tmp_path):
    often = "trainer.checkpoint.every_steps=1"
    with running(by_itself(), tmp_path / "run", *SP_PP, often) as run:
        for line in run.process.stdout:
            if "checkpoint: " in line and "step-00000004" in line:
                break
        run.send(1, signal.SIGKILL)
        run.end()
    assert not (tmp_path / "run" / "stopped.json").exists()
    goes_on(tmp_path / "run", checkpoints(tmp_path / "run")[-1], "parallel.microbatches=2")
