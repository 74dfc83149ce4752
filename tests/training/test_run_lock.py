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

from spatialdl.training import run_lock
from spatialdl.training.run_lock import LockHolder, held

HOLD = """
import signal, sys
from pathlib import Path
from spatialdl.training import run_lock
run_lock._LOOK_EVERY_S = 0.01
with run_lock.held(Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""
JOB = {"SLURM_CLUSTER_NAME": "lab", "SLURM_JOB_ID": "7"}


def start_of(job: str, number: int) -> dict[str, str]:
    return {**JOB, "SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(number)}


@contextmanager
def elsewhere(run_dir: Path, *launcher: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a run directory."""
    words = [*launcher, sys.executable, "-c", HOLD, str(run_dir)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env={**os.environ, **environment}, **pipes) as other:
        try:
            assert other.stdout.readline() == "held\n"
            yield other
        finally:
            other.kill()


@pytest.fixture
def become(monkeypatch):
    """Pretend that this process is a start of a Slurm job, with frequent checks."""
    monkeypatch.setattr(run_lock, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(run_lock, "_NOTICED_S", 20.0)

    def set_variables(job: str, number: int) -> None:
        for name, value in start_of(job, number).items():
            monkeypatch.setenv(name, value)

    return set_variables


def test_one_run_at_a_time_has_a_directory(tmp_path):
    refused = rf"another run is writing to .* \(process {os.getpid()} on .+\): wait for it"
    with (
        held(tmp_path / "new"),
        pytest.raises(ValueError, match=refused),
        held(tmp_path / "new"),
    ):
        pass
    with held(tmp_path / "new"):
        pass


def test_an_earlier_start_of_the_job_ends_when_a_later_one_has_its_directory(tmp_path, become):
    with elsewhere(tmp_path, **start_of("7", 0)) as earlier:
        become("7", 1)
        with held(tmp_path):
            assert earlier.poll() == 1
            assert f"restarted (job 7, process {os.getpid()} on" in earlier.stderr.read()
            become("8", 0)
            with pytest.raises(ValueError, match="another run is writing"), held(tmp_path):
                pass
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]


def test_an_earlier_start_that_does_not_answer_is_left_alone(tmp_path, become, monkeypatch):
    monkeypatch.setattr(run_lock, "_NOTICED_S", 0.05)
    warned = []
    monkeypatch.setattr(run_lock.log, "warning", lambda text, *words: warned.append(text % words))
    with elsewhere(tmp_path, **start_of("7", 1)) as earlier:
        earlier.send_signal(signal.SIGSTOP)
        become("7", 2)
        with held(tmp_path):
            assert len(warned) == 1
            assert f"job 7, process {earlier.pid} on" in warned[0]
            earlier.send_signal(signal.SIGCONT)  # the node comes back
            assert earlier.wait(20) == 1


@pytest.mark.parametrize("start", [("8", 1), ("7", 0)], ids=["another job", "the same start"])
def test_nobody_else_takes_a_directory(start, tmp_path, become):
    with elsewhere(tmp_path, **start_of("7", 0)) as other:
        become(*start)
        refused = f"another run is writing to .* \\(job 7, process {other.pid} on"
        with pytest.raises(ValueError, match=refused), held(tmp_path):
            pass
        assert other.poll() is None


def test_a_job_started_again_after_its_node_died_has_the_directory_at_once(tmp_path, become):
    for job in (start_of("7", 0), {}):  # or a run that was killed outside of any job
        with elsewhere(tmp_path, **job) as earlier:
            earlier.kill()
            earlier.wait()
            if job:
                become("7", 1)
            with held(tmp_path):
                assert LockHolder.read(tmp_path / ".lock") == LockHolder.here()


@pytest.mark.parametrize("text", ["", "[]", '{"start": "x"}'])
def test_a_lock_that_says_nothing_is_nobodys(text, tmp_path, become):
    (tmp_path / ".lock").write_text(text)
    become("7", 1)
    with held(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["job"] == "lab/7"


def test_where_there_are_no_locks_a_run_is_told_so_and_goes_on(tmp_path, monkeypatch):
    told = []

    def flock(*_: object) -> None:
        raise OSError(run_lock.NO_LOCKS[0], "no locks")

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)
    monkeypatch.setattr(run_lock.log, "info", lambda text, *words: told.append(text % words))
    with held(tmp_path):
        assert "has no locks: start no other run there" in told[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="another name of the machine needs root")
def test_a_run_on_another_host_is_told_with_its_name(tmp_path):
    renamed = ["unshare", "--uts", "sh", "-c", 'hostname node7 && exec "$@"', "sh"]
    refused = r"another run is writing to .* \(process \d+ on node7\): wait for it"
    with (
        elsewhere(tmp_path, *renamed),
        pytest.raises(ValueError, match=refused),
        held(tmp_path),
    ):
        pass
