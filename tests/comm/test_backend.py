"""Jobs over mpi4py that end in all the ways in which jobs end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from spatialdl.comm.launch import mpiexec_command
from tests.comm.programs import run

JOBS = Path(__file__).with_name("backend_jobs.py")


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


@pytest.mark.slow
@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_an_mpi_that_takes_one_thread_at_a_time(level):
    done = job(2, "one_thread", level)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{level} works") == 2


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


@pytest.mark.parametrize("frozen", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_a_rank_that_stops_is_named_after_the_timeout(frozen):
    said = ended(job(3, "freeze", frozen))
    waits = "s in group 'default_pg' (ranks 0, 1, 2): all_reduce of float32 (3, 5) by SUM with"
    assert said.count(waits) == 2  # of the other ranks, once
    assert "longer than the timeout of 2 s" in said
    assert f"no report from rank {frozen}" in said
    assert "which is stopped (SIGSTOP)" in said
    assert said.count("raise the timeout of init_process_group or new_group") == 1


GROUP_OF_ALL = "s in group 'default_pg' (ranks 0, 1): all_reduce of float64 (174,) by SUM"
PARTED = (
    "(ranks 0, 1): all_reduce of float32 (4,) by SUM with",
    "(ranks 0, 1): recv of float32 (2,) from rank 0, tag 9 with",
)
OF_A_GROUP = (
    "(ranks 0, 1): all_gather_into_tensor of int64 (4,) with rank 1",
    "longer than the timeout of 2 s",
)
OF_SOME = ("(ranks 0, 1): all_reduce of float32 (3, 5) by SUM with rank 1, longer than",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("freeze_overlapped", 2, (GROUP_OF_ALL,)),  # a thread that waits
        ("part_ways", 2, PARTED),
        ("wait_for_a_group", 2, OF_A_GROUP),
        ("wait_for_a_group_of_some", 3, OF_SOME),
    ],
)
def test_what_was_waited_for_is_told_after_the_timeout(name, ranks, expected):
    said = ended(job(ranks, name))
    for words in expected:
        assert words in said


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_job():
    said = ended(job(3, "die"))
    assert "Killed" in said or "signal 9" in said or "KILLED BY SIGNAL" in said
    assert "longer than the timeout" not in said  # nobody waited for that


@pytest.mark.parametrize("how", ["started", pytest.param("waited", marks=pytest.mark.slow)])
def test_calls_that_do_not_match_are_told_at_once_in_debug_mode(how):
    said = ended(job(2, "mismatch", how, TORCH_DISTRIBUTED_DEBUG="DETAIL"))
    assert "rank 0 is at number 2: all_reduce of float32 (3,) by SUM; rank 1 is at" in said
    assert "rank 1 is at number 2: all_reduce of float32 (4,) by SUM" in said
