"""How a process, and a job, ends on an error: what is said, and that no rank is left waiting."""

from __future__ import annotations

import re

import pytest

from spatialdl.comm.abort import describe_error
from spatialdl.comm.launch import mpiexec_command
from spatialdl.errors import NotFinite, UnsupportedSpatialOp
from tests.comm.programs import run

LOST = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[127.0.0.1]:4321. This is typically caused by another rank\nException raised from x.cpp"
)


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a grid of\n  2x1"), "a grid of 2x1"),
        (UnsupportedSpatialOp("aten.sort on a split image"), "aten.sort on a split image"),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (ValueError(), "ValueError"),
        (noted(OSError("the disk\nis gone"), "(sample 3)"), "the disk is gone (sample 3)"),
        (NotFinite("the loss is nan"), "the loss is nan"),
        (ValueError("no group\nConfig search path:\n\tprovider=main"), "no group"),
    ],
)
def test_a_users_mistake_is_one_sentence(error, text, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert describe_error(error) == text
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    assert describe_error(error) == text
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert type(error).__name__ in describe_error(error)


def test_a_defect_keeps_its_traceback_and_a_lost_connection_points_at_the_rank_that_left():
    try:
        raise KeyError("x")
    except KeyError as error:
        said = describe_error(error)
    assert said.startswith("Traceback")
    assert f"{__file__}" in said
    assert said.endswith("KeyError: 'x'")
    assert describe_error(RuntimeError(LOST)) == (
        "lost the connection to another rank, see its error or the launcher's "
        "(Connection closed by peer [127.0.0.1]:4321)"
    )


HOOK = """
import logging, sys
from logging.handlers import MemoryHandler
from spatialdl.comm.abort import install_abort_hook
logging.getLogger().addHandler(MemoryHandler(100, target=logging.StreamHandler(sys.stdout)))
install_abort_hook()
logging.getLogger().warning("kept back")
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code", "said", "logged"),
    [
        ("ValueError('the grid is\\ntoo fine')", 1, "error: the grid is too fine\n", "kept back\n"),
        ("KeyboardInterrupt", 130, "", None),
    ],
)
def test_a_process_that_nobody_launched_ends_in_one_line(error, code, said, logged):
    done = run("-c", HOOK.format(error=error))
    assert (done.returncode, done.stderr) == (code, said)
    assert done.stdout == (logged or done.stdout)


@pytest.mark.parametrize(("end", "code"), [("end_job(5)", 5), ("end_job_for_sure()", 1)])
def test_what_was_printed_before_the_end_is_not_lost(end, code):
    """Python keeps it back where nobody reads along, and `os._exit` throws it away."""
    done = run(
        "-c",
        "import sys\n"
        "from spatialdl.comm.ending import end_job, end_job_for_sure\n"
        "sys.stderr.reconfigure(line_buffering=False, write_through=False)\n"
        "print('last word', end='')\n"
        "print('last complaint', end='', file=sys.stderr)\n"
        f"{end}\n"
        "print('never')\n",
        PYTHONUNBUFFERED="",
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "last word", "last complaint")


def test_an_end_that_is_stuck_is_an_end():
    """Here in a pipe that is full and that nobody reads."""
    done = run(
        "-c",
        "import os, sys\n"
        "from spatialdl.comm import ending\n"
        "reads, writes = os.pipe()\n"
        "os.set_blocking(writes, False)\n"
        "try:\n"
        "    while os.write(writes, b'-' * 4096): pass\n"
        "except BlockingIOError:\n"
        "    os.set_blocking(writes, True)\n"
        "sys.stdout = os.fdopen(writes, 'w')\n"
        "print('does not fit')\n"
        "ending._SURELY_S = 0.2\n"
        "ending.end_job_for_sure()\n",
    )
    assert done.returncode == 1, done.stderr


# --- programs of users whose ranks fail, end or part, started without ``-m mpi4py``

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
KEY_ERROR = r"KeyError: '{0}'\nrank {1} on .* aborts the job: KeyError: '{0}'"
PARTED = (
    r"CommMismatch: rank \d at '.*' received a message of unexpected size",
    r"ranks call different operations: rank 0 is at 'adaptive_avg_pool2d over ranks.*', "
    rf"rank 1 at 'sum over ranks.*'; look for control flow that depends on the rank; {SWITCH}",
)
HUNG = (
    r"rank \d on \S+: waits for \d s in .*, longer than init_mesh\(timeout=6\)",
    r"rank 0 is at 'conv2d forward plan \w+', rank 1 at 'batch_norm statistics over ranks",
    SWITCH,
    r"raise init_mesh\(timeout=\), None for no limit",
)


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("parts", PARTED),
        slow("hangs", HUNG),
        slow("raises", (KEY_ERROR.format("mine", 1),)),
        slow("all raise", (KEY_ERROR.format("ours", 0),)),
    ],
)
def test_ranks_that_fail_end_all_and_say_why(how, said):
    done = run("-c", PROGRAM, how, launcher=mpiexec_command(2))
    assert done.returncode != 0
    for words in said:
        assert re.search(words, done.stderr), done.stderr
    if "raise" in how:
        assert done.returncode == 1
        assert done.stderr.count("Traceback") == 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["goes well", "has a thread that raises"])
def test_a_program_that_goes_well_ends_well(how):
    """Python lets a program live one of whose threads has ended."""
    done = run("-c", PROGRAM, how, launcher=mpiexec_command(2))
    assert (done.returncode, done.stdout) == (0, "all is well\n"), done.stderr
    assert ("ZeroDivisionError" in done.stderr) == ("thread" in how)


OF_A_MESH = """
import sys
from spatialdl.comm.abort import end_job_on_errors
sys.excepthook = lambda kind, error, where: print("printed as before:", repr(error))
end_job_on_errors()
end_job_on_errors()  # of a second mesh
"""


def test_the_hook_that_was_there_prints():
    done = run("-c", f"{OF_A_MESH}\nraise KeyError('mine')")
    assert done.returncode == 1
    assert done.stdout == "printed as before: KeyError('mine')\n"
    assert done.stderr == "this process aborts the job: KeyError: 'mine'\n"


def test_an_interactive_session_goes_on():
    done = run("-i", "-c", OF_A_MESH, typed="1 / 0\nprint('still here')\n")
    assert done.returncode == 0
    assert "printed as before: ZeroDivisionError('division by zero')\nstill here" in done.stdout
