"""Jobs over mpi4py that end in all the ways in which jobs end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from spatialdl.comm.launch import mpiexec_command
from tests.comm.programs import run

JOBS = Path(__file__).with_name("backend_jobs.py")


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def job(ranks: int, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one; nothing may take longer than the limit."""
    launcher = mpiexec_command(ranks) if ranks > 1 else ()
    return run(str(JOBS), *words, launcher=launcher, **variables)


def ended(done: subprocess.CompletedProcess[str]) -> str:
    """What was said by a job that an error ended, in order and not by a crash."""
    assert done.returncode != 0
    for crash in ("Segmentation fault", "core dumped", "terminate called", "Fatal Python error"):
        assert crash not in done.stderr
    return done.stderr


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_program_that_destroys_nothing_ends_in_peace(ranks):
    """One process needs no launcher."""
    done = job(ranks, "leave_without_goodbye")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("leaves") == ranks
    assert done.stderr == ""


def test_an_exception_on_one_rank_ends_the_job():
    said = ended(job(2, "raise_on_one"))
    assert said.count("rank 1 has had enough") == 2  # the line of the traceback, and the message


GROUP_OF_ALL = "all_reduce of float64 (174,) by SUM in group 'default_pg' (ranks 0, 1) took longer"
OF_A_GROUP = (
    "rank 0: all_gather_into_tensor of int64 (4,) in group",
    "(ranks 0, 1) took longer than the timeout of 2 s",
)
FROZEN = (
    "rank 0: all_reduce of float32 (3, 5) by SUM in group 'default_pg' (ranks 0, 1) took "
    "longer than the timeout of 2 s, raise the timeout of init_process_group or new_group",
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("freeze", FROZEN),
        slow("freeze_overlapped", (GROUP_OF_ALL,)),  # a thread that waits
        slow("wait_for_a_group", OF_A_GROUP),
    ],
)
def test_what_was_waited_for_is_told_after_the_timeout(name, expected):
    said = ended(job(2, name))
    for words in expected:
        assert words in said
