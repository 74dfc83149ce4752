"""Ranks that hang: real ones, stopped by signals in the middle of a run."""

from __future__ import annotations

import re
import signal
from datetime import timedelta

import pytest

from spatialdl.comm import waiting
from spatialdl.comm.launch import mpiexec_command
from spatialdl.comm.waiting import check_timeout
from tests.comm.programs import run as run_python
from tests.comm.running import (
    Run,
    by_itself,
    by_mpiexec,
    by_torchrun,
    running,
    with_failing,
)

LAYOUTS = {
    "sp": ["parallel=sp"],
    "pp": ["parallel=pp", "parallel.microbatches=2"],
    "dp": ["parallel=dp"],
    "sp+pp": ["parallel=sp+pp", "parallel.microbatches=2"],
}
SECONDS = 6
"""Busy machines take their time for a first step."""

TIMEOUT = f"comm.timeout={SECONDS}"
RANKS = {"sp": 2, "pp": 2, "dp": 2, "sp+pp": 3}
WAITS = r"rank (\d) on \S+, step \d+.*: waits for \d+ s in (.*) with ranks? ([\d, ]+)"
HALO = r"exchange for conv2d \(plan \w+\), in module 1 \(Conv2d\),"
HANDOVER = "hand-over forward of micro-batch 0"
SUM = "gradients present: all-reduce"


def slow(*values: object):
    return pytest.param(*values, marks=pytest.mark.slow)


def assert_told(said: str, run: Run, stopped: int) -> dict[int, str]:
    """What the others wait for, if all say so, and one of them blames the right one."""
    waits = re.findall(WAITS, said)
    assert sorted(int(rank) for rank, *_ in waits) == sorted(run.ranks.keys() - {stopped}), said
    assert any(str(stopped) in peers for _, _, peers in waits), said
    assert f"longer than {TIMEOUT}" in said
    pid = run.ranks[stopped]
    blame = rf"no report from rank {stopped} \(process {pid} on .*\), which is stopped"
    assert len(re.findall(blame, said)) == 1, said
    return {int(rank): what for rank, what, _ in waits}


@pytest.mark.parametrize(
    ("layout", "start", "words", "stopped", "expected"),
    [
        ("sp+pp", by_mpiexec, [], 1, {0: HALO, 2: HANDOVER}),
        slow("sp", by_mpiexec, ["comm.transport=torch"], 1, {0: HALO}),
        slow("pp", by_mpiexec, [], 0, {1: HANDOVER}),
        slow("dp", by_mpiexec, [], 1, {0: SUM}),
        slow("dp", by_torchrun, [], 0, {1: SUM}),
    ],
)
def test_all_say_what_they_wait_for_when_a_rank_stops_in_forward(
    layout, start, words, stopped, expected, tmp_path
):
    words = [*LAYOUTS[layout], *words, TIMEOUT, *with_failing("stops", stopped)]
    with running(start(RANKS[layout]), tmp_path, *words) as run:
        told = assert_told(run.end(), run, stopped)
    for rank, what in expected.items():
        assert re.search(what, told[rank]), told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "stopped", "start"),
    [("dp", 0, by_torchrun), ("sp+pp", 2, by_mpiexec)],
)
def test_all_say_what_they_wait_for_when_a_rank_is_stopped(layout, stopped, start, tmp_path):
    """Wherever it is."""
    with running(start(RANKS[layout]), tmp_path, *LAYOUTS[layout], TIMEOUT) as run:
        run.send(stopped, signal.SIGSTOP)
        assert_told(run.end(), run, stopped)


OVERLAPPED = """
import os, signal
import torch
import spatialdl
from spatialdl.comm.waiting import limit_waits
from spatialdl.comm.world import start_world

limit_waits(SECONDS)
world = start_world()
model = spatialdl.SpatialParallel(torch.nn.Linear(3, 2), spatialdl.init_mesh(grid=(1, 1), data=2))
for step in range(3):
    if step == 2 and world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    model(torch.ones(4, 3)).sum().backward()
"""


@pytest.mark.slow
def test_gradients_that_overlap_with_backward_are_waited_for_too():
    program = OVERLAPPED.replace("SECONDS", str(SECONDS))
    done = run_python("-c", program, launcher=mpiexec_command(2))
    assert done.returncode != 0
    assert re.search(r"rank 0 on \S+: waits for \d+ s in gradients.* with rank 1", done.stderr)
    assert "no report from rank 1" in done.stderr


@pytest.mark.slow
def test_a_job_that_was_suspended_as_a_whole_goes_on(tmp_path):
    """The clock runs meanwhile, but nobody has waited for anybody."""
    with running(by_mpiexec(2), tmp_path, "parallel=sp", TIMEOUT) as run:
        for rank in run.ranks:
            run.send(rank, signal.SIGSTOP)
        signal.sigtimedwait([], 1.5 * SECONDS)
        for rank in run.ranks:
            run.send(rank, signal.SIGCONT)
        run.process.send_signal(signal.SIGUSR1)
        said = run.process.communicate(timeout=60)[0]
    assert "stopped by SIGUSR1 after step" in said
    assert "waits for" not in said


@pytest.mark.slow
def test_a_rank_that_does_something_else_says_where_it_is(tmp_path):
    words = ["parallel=dp", TIMEOUT, *with_failing("sleeps")]
    with running(by_itself(), tmp_path, *words) as run:
        said = run.end()
    assert re.search(r"rank 0 on .*: waits for \d+ s in .* with rank 1", said), said
    alone = r"rank 1 on .*, step \d+, forward 0, stage 0: does not wait for other ranks; at "
    assert re.search(alone + r"tests/comm/running.py:\d+ in forward", said), said
    last = said.splitlines()[-1]
    assert "rank 1 did not enter the communication, see above" in last, said


@pytest.mark.parametrize("value", ["soon", -1, float("nan"), float("inf"), True, [3]])
def test_a_timeout_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=r"comm\.timeout=.* must be the seconds"):
        check_timeout(value)


@pytest.mark.parametrize("value", [None, 0, 0.5, 90])
def test_a_timeout_is_seconds_or_null_and_groups_give_up_later(value, monkeypatch):
    """Torch keeps its own timeouts until a limit is set."""
    monkeypatch.setattr(waiting._Limit, "seconds", None)
    monkeypatch.setattr(waiting._Limit, "is_set", False)
    assert waiting.timeout_of_groups() is waiting.limit_seconds() is None
    check_timeout(value)
    waiting.limit_waits(value)
    assert waiting.limit_seconds() == (value or None)
    later = timedelta(seconds=value + 60) if value else timedelta(days=30)
    assert waiting.timeout_of_groups() >= later


def test_a_limit_needs_no_pytorch():
    """It is asked before ranks are started."""
    code = "import spatialdl.comm.waiting, sys; sys.exit('torch' in sys.modules)"
    assert run_python("-c", code).returncode == 0
