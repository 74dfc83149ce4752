"""What is printed last, and that nobody is left, when a rank raises or is killed."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from spatialdl.comm.liveness import SWITCH, Liveness, print_last, report_exit, report_start
from spatialdl.comm.processes import Process
from tests.comm.running import by_itself, by_mpiexec, by_torchrun, running, with_failing

HOST = socket.gethostname()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "words"),
    [
        (by_itself(), ["parallel=sp"]),
        (by_itself(), ["parallel=sp", "comm.transport=torch"]),
        (by_mpiexec(2), ["parallel=sp"]),
        (by_torchrun(2), ["parallel=dp"]),
    ],
)
def test_the_traceback_of_a_rank_that_raises_comes_last(start, words, tmp_path):
    with running(start, tmp_path, *words, *with_failing("raises")) as run:
        said = run.end()
    traceback = rf"rank 1 on {HOST}: Traceback.*?\nZeroDivisionError: this rank has had enough\n"
    found = re.findall(traceback, said, re.DOTALL)
    assert len(found) == 1, said
    if start == by_itself():
        assert said.endswith(found[0]), said
    if start == by_torchrun(2):
        assert "ZeroDivisionError" in said.rpartition("Root Cause")[2], said


# --- without ranks


@pytest.fixture
def calls(monkeypatch):
    with Liveness(1) as calls:
        for name, value in calls.environment.items():
            monkeypatch.setenv(name, value)
        yield calls


def end(calls: Liveness) -> None:
    calls.__exit__(None, None, None)
    calls.environment = {}


def test_last_words_are_printed_once_and_when_all_is_over(calls, monkeypatch, capsys):
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    print_last("rank 0: the grid is too fine")
    print_last("rank 0: the grid is too fine")
    assert capsys.readouterr().err == ""
    end(calls)
    assert capsys.readouterr().err == "rank 0: the grid is too fine\n"
    assert calls.vanished() is None


def test_long_words_lose_their_beginning(calls, monkeypatch, capsys):
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    print_last("é" * 1_000_000 + "the end")
    end(calls)
    assert capsys.readouterr().err.endswith("ééthe end\n")


def test_where_nobody_listens_last_words_are_printed_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    for place in (str(tmp_path / "gone"), "x" * 200):
        monkeypatch.setenv(SWITCH, place)
        report_start(0)
        report_exit()
        print_last("no more")
        assert capsys.readouterr().err == "no more\n"


def test_nobody_has_vanished_where_a_rank_is_elsewhere(calls):
    """Its end is not seen from here, and who ended first is unknown."""
    calls._world_size = 2
    report_start(0)
    end(calls)
    assert calls.vanished() is None


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


def test_one_that_is_stopped_or_was_killed_says_so_while_it_is_there(child):
    stop(child)
    assert child.state() == "stopped (SIGSTOP)"
    os.kill(child.pid, signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    assert child.state() is None
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.state() == "dead"
    multiprocessing.active_children()  # reaps it
    assert child.state() is None


def test_a_process_elsewhere_or_of_another_time_is_another_one(child):
    stop(child)
    assert child._replace(host="elsewhere").state() is None
    assert child._replace(started=str(int(child.started) - 1)).state() is None
