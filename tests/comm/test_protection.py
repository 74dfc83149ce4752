"""Programs of users whose ranks fail, end or part: real ones, started without ``-m mpi4py``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.programs import ROOT, run_program

PROGRAM = """
    import sys
    import threading

    import torch
    import torch.nn.functional as F

    import spatialdl

    how = sys.argv[1]
    mesh = spatialdl.init_mesh(grid=(2, 1), timeout=6 if how == "hangs" else "default")
    rank = mesh.comm.rank
    x = spatialdl.shard(torch.ones(1, 2, 12, 8), mesh)
    x.sum()
    if how == "parts":
        F.adaptive_avg_pool2d(x, 1) if rank == 0 else x.sum()
    if how == "hangs":
        kernel = torch.ones(1, 2, 3, 3)
        F.conv2d(x, kernel) if rank == 0 else F.batch_norm(x, None, None, training=True)
    if how == "raises" and rank == 1:
        raise KeyError("mine")
    if how == "all raise":
        raise KeyError("ours")
    if how == "exits" and rank == 1:
        sys.exit(3)
    if how == "makes fewer steps" and rank == 1:
        raise SystemExit
    if how == "has a thread that raises" and rank == 1:
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    x.sum()
    mesh.comm.gather(how)  # of which rank 1 is done before rank 0
    if rank == 0:
        print("all is well")
    """
SWITCH = r"init_mesh\(check=True\), or SPATIALDL_COMM_CHECK=1 in the environment"


def slow(how: str) -> object:
    return pytest.param(how, marks=pytest.mark.slow)


def test_ranks_that_part_are_named_with_what_each_does(tmp_path):
    done = run_program(tmp_path, PROGRAM, "parts")
    assert done.returncode != 0
    assert re.search(
        r"CommMismatch: rank \d at '.*' received a message of unexpected size", done.stdout
    )
    both = (
        r"ranks call different operations: rank 0 is at 'adaptive_avg_pool2d over ranks.*', "
        rf"rank 1 at 'sum over ranks.*'; look for control flow that depends on the rank; {SWITCH}"
    )
    assert re.search(both, done.stdout), done.stdout


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_are_ended_and_named(tmp_path):
    done = run_program(tmp_path, PROGRAM, "hangs")
    assert done.returncode != 0
    waits = r"rank \d on \S+: waits for \d s in .*, longer than init_mesh\(timeout=6\)"
    assert re.search(waits, done.stdout), done.stdout
    both = r"rank 0 is at 'conv2d forward plan \w+', rank 1 at 'batch_norm statistics of all ranks"
    assert re.search(both, done.stdout), done.stdout
    assert re.search(SWITCH, done.stdout)
    assert "raise init_mesh(timeout=), None for no limit" in done.stdout


@pytest.mark.parametrize("how", ["raises", slow("all raise")])
def test_an_uncaught_exception_is_printed_and_ends_all(how, tmp_path):
    done = run_program(tmp_path, PROGRAM, how)
    assert done.returncode == 1
    rank, word = (1, "mine") if how == "raises" else (0, "ours")
    assert f"KeyError: '{word}'\nrank {rank} on " in done.stdout, done.stdout
    assert f"aborts the job: KeyError: '{word}'" in done.stdout
    assert done.stdout.count("Traceback") == 1, done.stdout


@pytest.mark.parametrize("how", ["exits", slow("makes fewer steps")])
def test_a_rank_that_ends_while_others_wait_for_it_ends_all(how, tmp_path):
    done = run_program(tmp_path, PROGRAM, how)
    assert done.returncode != 0
    waits = r"rank 0 on \S+: waits for \d+ s in .* with rank 1, but rank 1 has exited"
    assert re.search(waits, done.stdout), done.stdout
    assert "rank 1 exited while other ranks waited: by sys.exit" in done.stdout


@pytest.mark.parametrize("how", [slow("goes well"), slow("has a thread that raises")])
def test_a_program_that_goes_well_ends_well(how, tmp_path):
    """Python lets a program live one of whose threads has ended."""
    done = run_program(tmp_path, PROGRAM, how)
    assert done.returncode == 0, done.stdout
    assert "all is well" in done.stdout
    assert ("ZeroDivisionError" in done.stdout) == ("thread" in how)


HOOK = """
import sys
from spatialdl.comm.abort import end_job_on_errors
sys.excepthook = lambda kind, error, where: print("printed as before:", repr(error))
end_job_on_errors()
end_job_on_errors()  # of a second mesh
"""


def run_python(folder: Path, *words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        input=typed,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_hook_that_was_there_prints(tmp_path):
    done = run_python(tmp_path, "-c", f"{HOOK}\nraise KeyError('mine')")
    assert done.returncode == 1
    assert done.stdout == "printed as before: KeyError('mine')\n"
    assert done.stderr == "this process aborts the job: KeyError: 'mine'\n"


def test_an_interactive_session_goes_on(tmp_path):
    done = run_python(tmp_path, "-i", "-c", HOOK, typed="1 / 0\nprint('still here')\n")
    assert done.returncode == 0
    assert "printed as before: ZeroDivisionError('division by zero')\nstill here" in done.stdout


def test_one_rank_is_never_ended(tmp_path):
    program = "import sys, spatialdl; spatialdl.init_mesh(); sys.exit(sys.excepthook is not before)"
    done = run_python(tmp_path, "-c", f"import sys; before = sys.excepthook\n{program}")
    assert done.returncode == 0, done.stderr
