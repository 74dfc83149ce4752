"""Real signals to real processes; whole runs that are stopped are in tests/test_stopping.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spatialdl.comm.launch import mpiexec_command
from spatialdl.training import signals
from spatialdl.training.signals import STOPPING, agreed, flags
from tests.vision import import_path

WAITS = """
import os, sys, time
from spatialdl.training import signals
signals.install()
signals.install()  # as the jobs of a sweep do
if sys.argv[1] != "start":
    signals.step_done()
print("ready", flush=True)
while not any(signals.flags()):
    time.sleep(0.001)
print(*signals.flags(), flush=True)
if sys.argv[1] == "go on":
    import ctypes
    while True:
        ctypes.CDLL(None).sleep(60)  # as in MPI, Python's handlers cannot run; a signal ends it
"""


@contextmanager
def process(what: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS, what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": import_path()},
    ) as waits:
        try:
            yield waits
        finally:
            waits.kill()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_first_signal_only_asks(number):
    with process("end") as waits:
        assert waits.stdout.readline() == "ready\n"
        waits.send_signal(number)
        seen = [float(word) for word in waits.stdout.readline().split()]
        assert agreed(seen) is number
        assert waits.wait(60) == 0
        assert "stopping after this step" in waits.stderr.read()


@pytest.mark.parametrize("number", STOPPING, ids=lambda one: one.name)
def test_before_the_first_step_only_a_scheduler_waits_for_it(number):
    """Ctrl-C and SIGTERM took as long as the start and a step, 260 s in one case."""
    with process("start") as waits:
        assert waits.stdout.readline() == "ready\n"
        waits.send_signal(number)
        is_kept = number == signal.SIGUSR1
        assert waits.wait(60) == (0 if is_kept else 128 + number)
        said = waits.stderr.read()
        assert f"stopped by {number.name} before the first step was done" in said or is_kept


def test_nobody_has_asked_for_anything_here():
    assert flags() == [0.0, 0.0, 0.0]
    assert agreed([0.0, 0.0, 0.0]) is None
    assert agreed([0.0, 3.0, 1.0]) is signal.SIGTERM


def test_a_second_one_ends_even_a_process_that_waits_outside_of_python():
    with process("go on") as waits:
        assert waits.stdout.readline() == "ready\n"
        waits.send_signal(signal.SIGINT)
        waits.stdout.readline()
        waits.send_signal(signal.SIGINT)
        assert waits.wait(60) == 128 + signal.SIGINT


ENDS = """
import os, re, signal
from pathlib import Path
from mpi4py import MPI
from spatialdl.training import signals
signals.install()
world = MPI.COMM_WORLD
other = world.bcast(os.getpid())
if world.rank == 0:
    signals.ignore()  # and wait in MPI_Finalize
else:
    caught = 1 << signal.SIGUSR1 - 1
    while int(re.search("SigCgt:(.*)", Path(f"/proc/{other}/status").read_text())[1], 16) & caught:
        pass
    os.kill(other, signal.SIGUSR1)
"""


def test_a_rank_that_waits_for_the_others_to_end_is_not_killed():
    """Python removes its handlers first, so a signal to a second rank made the job fail."""
    done = subprocess.run(
        [*mpiexec_command(2), sys.executable, "-c", ENDS],
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr


def test_several_ways_to_tell_the_same_count_once(monkeypatch):
    """Launchers and schedulers may do so; a user who presses Ctrl-C twice means it."""
    clock, ended = [100.0], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(signals, "end_job", ended.append)
    monkeypatch.setattr(signals._Seen, "first", None)
    signals.step_done()
    for number, at, code in (
        (signal.SIGUSR1, 100.0, None),
        (signal.SIGTERM, 100.9, None),
        (signal.SIGINT, 100.9, 130),
        (signal.SIGTERM, 101.1, 143),
    ):
        clock[0] = at
        signals._see(number)
        assert ended == ([] if code is None else [code])
        ended.clear()
    assert agreed(flags()) is signal.SIGUSR1
