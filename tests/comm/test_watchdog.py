"""Ranks that hang: real ones, stopped by signals in the middle of a run."""

from __future__ import annotations

import re
import signal

import pytest

from spatialdl.comm.limit import check_timeout
from tests.comm.running import by_mpiexec, by_torchrun, running

LAYOUTS = {
    "sp": ["parallel=sp"],
    "pp": ["parallel=pp", "parallel.microbatches=2"],
    "dp": ["parallel=dp"],
    "sp+pp": ["parallel=sp+pp", "parallel.microbatches=2"],
}
RANKS = {"sp": 2, "pp": 2, "dp": 2, "sp+pp": 3}
WAITS = r"rank (\d) on \S+, step \d+.*: waits for \d+ s in (.*) with ranks? ([\d, ]+)"


def slow(*values: object):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("layout", "start", "words", "stopped"),
    [
        ("sp+pp", by_mpiexec, [], 1),
        ("sp", by_torchrun, [], 0),
        slow("sp", by_mpiexec, [], 1),
        slow("pp", by_mpiexec, [], 0),
        slow("dp", by_mpiexec, [], 1),
        slow("dp", by_mpiexec, ["comm.backend=mpi4py"], 1),
        slow("sp+pp", by_mpiexec, ["comm.transport=torch"], 0),
        slow("pp", by_torchrun, [], 1),
        slow("dp", by_torchrun, [], 0),
        slow("sp+pp", by_torchrun, [], 2),
    ],
)
def test_all_say_what_they_wait_for_when_a_rank_has_stopped(
    layout, start, words, stopped, tmp_path
):
    size = RANKS[layout]
    words = [*LAYOUTS[layout], *words, "comm.timeout=2"]
    with running(start(size), tmp_path, *words) as run:
        run.send(stopped, signal.SIGSTOP)
        said = run.end()
    waits = re.findall(WAITS, said)
    assert sorted(int(rank) for rank, *_ in waits) == sorted({*range(size)} - {stopped}), said
    assert any(str(stopped) in peers for _, _, peers in waits), said
    assert "longer than comm.timeout=2" in said
    pid = run.ranks[stopped]
    blame = rf"nothing was heard of rank {stopped} \(process {pid} on .*\), which is stopped"
    assert len(re.findall(blame, said)) == 1, said


def test_a_job_that_was_suspended_as_a_whole_goes_on(tmp_path):
    """The clock runs meanwhile, but nobody has waited for anybody."""
    with running(by_mpiexec(2), tmp_path, "parallel=sp", "comm.timeout=2") as run:
        for rank in run.ranks:
            run.send(rank, signal.SIGSTOP)
        signal.sigtimedwait([], 4)
        for rank in run.ranks:
            run.send(rank, signal.SIGCONT)
        run.process.send_signal(signal.SIGUSR1)
        said = run.process.communicate(timeout=60)[0]
    assert "stopped by SIGUSR1 after step" in said
    assert "waits for" not in said


@pytest.mark.parametrize("value", ["soon", -1, float("nan"), float("inf"), True, [3]])
def test_a_timeout_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=r"comm\.timeout=.* must be seconds"):
        check_timeout(value)


@pytest.mark.parametrize("value", [None, 0, 0.5, 1800])
def test_a_timeout_is_seconds_or_null(value):
    check_timeout(value)
