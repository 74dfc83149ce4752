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
    by_mpiexec,
    by_torchrun,
    running,
    with_failing,
)

LAYOUTS = {
    "sp": ["parallel=sp"],
    "dp": ["parallel=dp"],
    "sp+pp": ["parallel=sp+pp", "parallel.microbatches=2"],
}
SECONDS = 6
"""Busy machines take their time for a first step."""

TIMEOUT = f"comm.timeout={SECONDS}"
RANKS = {"sp": 2, "dp": 2, "sp+pp": 3}
WAITS = r"rank (\d) on \S+, step \d+.*: waits for \d+ s in (.*) with ranks? ([\d, ]+)"
HALO = r"exchange for conv2d \(plan \w+\), in module 1 \(Conv2d\),"
HANDOVER = "hand-over forward of micro-batch 0"
SUM = "gradients present: all-reduce"


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


RANKS_ALONE = """
import os, signal, sys
from mpi4py import MPI
from spatialdl.comm import waiting
from spatialdl.comm.watchdog import start_watchdog
world = MPI.COMM_WORLD
waiting.limit_waits(2)
start_watchdog(world)
waiting.at("step 7")
if world.rank == 1:
    if sys.argv[1] == "exits":
        sys.exit(3)
    if sys.argv[1] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if sys.argv[1] == "sleeps":
        signal.pause()
if world.rank == 0 and sys.argv[1] == "waits for another":
    waiting.noted("a message", [1], world.recv, None, 1)
waiting.noted("the sum", range(world.size), world.Barrier)
"""
ALONE = r"rank 1 on \S+, step 7: does not wait for other ranks; "
NOT_THERE = "rank 1 did not enter the communication, see above"


@pytest.mark.parametrize(
    ("how", "rank_0", "said"),
    [
        ("stops", r"the sum with ranks 1, 2", [r"no report from rank 1 \(.*\), which is stopped"]),
        ("sleeps", r"the sum with ranks 1, 2", [ALONE + r"at <string>:\d+ in <module>", NOT_THERE]),
        (
            "exits",
            r"the sum with ranks 1, 2",
            [ALONE + r"for \d+ s it is in exit of all ranks", NOT_THERE],
        ),
        ("waits for another", "a message with rank 1", ["all ranks wait for each other: look for"]),
    ],
)
def test_all_say_what_they_wait_for(how, rank_0, said):
    """Ranks that import no PyTorch; the same of training is marked as slow."""
    done = run_python("-c", RANKS_ALONE, how, launcher=mpiexec_command(3))
    assert done.returncode != 0
    waits = r"rank {} on \S+, step 7: waits for \d+ s in {}"
    texts = [waits.format(0, rank_0), waits.format(2, "the sum with ranks 0, 1"), *said]
    for text in [*texts, r"longer than comm\.timeout=2"]:
        assert re.search(text, done.stderr), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "start", "words", "stopped", "expected"),
    [
        ("sp+pp", by_mpiexec, [], 1, {0: HALO, 2: HANDOVER}),
        ("sp", by_mpiexec, ["comm.transport=torch"], 1, {0: HALO}),
        ("dp", by_torchrun, [], 0, {1: SUM}),
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
