"""Real processes: stopped, killed, and gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from spatialdl.comm.processes import Process


def work(told: Connection) -> None:
    Path("/proc/self/comm").write_text("a) Z (b")  # any program may call itself so
    told.send(Process.own())
    signal.pause()


@pytest.fixture
def child() -> Iterator[Process]:
    here, there = multiprocessing.Pipe()
    started = multiprocessing.get_context("fork").Process(target=work, args=(there,))
    started.start()
    yield here.recv()
    started.kill()
    started.join()


def stop(child: Process) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_process_that_runs_has_no_excuse(child):
    assert child.state() is None
    assert Process.own().state() is None
    assert (child.host, child.pid != os.getpid()) == (socket.gethostname(), True)
    assert int(child.started) > int(Process.own().started)
    assert str(child) == f"process {child.pid} on {child.host}"


def test_one_that_was_stopped_says_so_until_it_goes_on(child):
    stop(child)
    assert child.state() == "stopped (SIGSTOP)"
    os.kill(child.pid, signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    assert child.state() is None


def test_one_that_was_killed_is_dead_and_then_unknown(child):
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.state() == "dead"
    os.waitpid(child.pid, 0)
    assert child.state() is None


def test_a_process_elsewhere_or_of_another_time_is_another_one(child):
    stop(child)
    assert child._replace(host="elsewhere").state() is None
    assert child._replace(started=str(int(child.started) - 1)).state() is None
