from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spatialdl.comm.capacity import check_capacity
from spatialdl.comm.launch import (
    LaunchInfo,
    check_mpi_world,
    disable_tcp_on_one_machine,
    launched,
    mpiexec_command,
    start_ranks,
)
from spatialdl.comm.launcher_output import NoticeFilter
from spatialdl.comm.scratch import PREFIX, job_folder
from tests.comm.programs import run

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"
SHARED_MEMORY = "OMPI_MCA_btl_sm_backing_directory"
SLURM_JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SLURM_STEP = {**SLURM_JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (OPEN_MPI, LaunchInfo(2, 4, 1, "mpiexec")),
        ({**PMI, "MPI_LOCALRANKID": "0"}, LaunchInfo(3, 4, 0, "mpiexec")),
        (PMI, LaunchInfo(3, 4, 3, "mpiexec")),
        ({**SLURM_STEP, **PMI}, LaunchInfo(3, 4, 1, "srun")),
        (
            {f"MV2_COMM_WORLD_{k}": v for k, v in (("RANK", "1"), ("SIZE", "2"))}
            | {"MV2_COMM_WORLD_LOCAL_RANK": "0"},
            LaunchInfo(1, 2, 0, "mpiexec"),
        ),
        (SLURM_STEP, LaunchInfo(5, 8, 1, "srun")),
        ({**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "6"}, LaunchInfo(5, 6, 1, "srun")),
        (SLURM_JOB, None),  # a batch script
        ({**SLURM_JOB, "SLURM_STEP_ID": "batch"}, None),
        ({**SLURM_JOB, "SLURM_STEP_ID": "interactive"}, None),
        (TORCHRUN, LaunchInfo(3, 4, 1, "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "4"}, None),
        ({"RANK": "me", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, None),
        ({**SLURM_STEP, **OPEN_MPI}, LaunchInfo(2, 4, 1, "mpiexec")),  # mpiexec within a step
        ({**SLURM_STEP, **TORCHRUN}, LaunchInfo(3, 4, 1, "torchrun")),
        ({**SLURM_STEP, **PMI, **TORCHRUN, **ELASTIC}, LaunchInfo(3, 4, 1, "torchrun")),
        ({**OPEN_MPI, **TORCHRUN, **ELASTIC}, LaunchInfo(3, 4, 1, "torchrun")),
    ],
)
def test_launched_reads_what_the_launcher_says(environment, expected):
    assert launched(environment) == expected


@pytest.mark.parametrize(
    ("environment", "advice"),
    [
        (SLURM_STEP, r"srun started 8 ranks.*has size 1: .*--mpi=pmix.*--mpi=pmi2"),
        (OPEN_MPI, "mpiexec started 4 ranks.*has size 1: mpiexec belongs to another MPI"),
        (TORCHRUN, "torchrun started 4 ranks.*has size 1: set comm.transport=torch, or launch"),
    ],
)
def test_many_worlds_of_one_are_told_with_advice(environment, advice):
    with pytest.raises(ValueError, match=advice):
        check_mpi_world(1, environment)
    info = launched(environment)
    check_mpi_world(info.size, environment)
    check_mpi_world(1, {})


# --- the command line of the launcher, seen by a script in its place


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A bin folder for stand-ins, with Python in it, and no launcher's environment around."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI", "OMP_", "SPATIALDL_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def stand_in(folder: Path, name: str, version: str = "", code: int = 0, ask: str = "--version"):
    """A launcher that writes down its arguments and environment instead of starting ranks."""
    script = folder / name
    script.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = {ask} ]; then echo "{version}"; exit; fi\n'
        f'printf "%s\\n" "$@" > {folder}/arguments; env > {folder}/environment; exit {code}\n'
    )
    script.chmod(0o755)


def seen(folder: Path) -> tuple[list[str], dict[str, str]]:
    lines = (folder / "environment").read_text().splitlines()
    environment = dict(line.split("=", 1) for line in lines if "=" in line)
    return (folder / "arguments").read_text().splitlines(), environment


@pytest.mark.parametrize("version", ["mpiexec (Open MPI) 5.0.11", "mpirun (Open MPI) 4.1.6"])
def test_open_mpi_gets_its_options(place, version, monkeypatch):
    stand_in(place, "mpiexec", version)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert start_ranks(3, "package.job", ["a=1", "b='x y'"]) == 0
    arguments, environment = seen(place)
    options = ["--oversubscribe", "--bind-to", "none", "--allow-run-as-root", "-n", "3"]
    assert arguments == [*options, sys.executable, "-m", "package.job", "a=1", "b='x y'"]
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "OMPI_MCA_mpi_yield_when_idle" not in environment


def test_mpich_gets_no_options(place, monkeypatch):
    stand_in(place, "mpiexec", "HYDRA build details:")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    start_ranks(5, "job", [])
    arguments, environment = seen(place)
    assert arguments == ["-n", "5", sys.executable, "-m", "job"]
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["OMPI_MCA_mpi_yield_when_idle"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    start_ranks(2, "job", [])
    assert seen(place)[1]["OMP_NUM_THREADS"] == "7", "what the user has set is kept"


def test_open_mpi_keeps_its_files_of_a_job_where_no_other_job_has_any(place, monkeypatch):
    stand_in(place, "mpiexec")
    monkeypatch.delenv(SESSIONS, raising=False)
    folders = set()
    for _ in range(2):
        assert start_ranks(2, "job", []) == 0
        environment = seen(place)[1]
        folders |= {environment[name] for name in (SESSIONS, SHARED_MEMORY)}
    assert len(folders) == 4
    assert not any(map(os.path.exists, folders))
    monkeypatch.setenv(SESSIONS, str(place))
    assert start_ranks(2, "job", []) == 0
    assert seen(place)[1][SESSIONS] == str(place)
    assert place.exists()


def test_folders_of_killed_jobs_are_removed(tmp_path):
    with job_folder(tmp_path) as used:
        (tmp_path / f"{PREFIX}killed" / "session").mkdir(parents=True)
        for folder in tmp_path.iterdir():
            os.utime(folder, (0, 0))
        with job_folder(tmp_path) as folder:
            assert {str(one) for one in tmp_path.iterdir()} == {used, folder}
    assert not list(tmp_path.iterdir())


RULE = "-" * 74 + "\n"
TABLE = f"{RULE}rows\n{RULE}"
NOTICE = f"{RULE}prterun has exited due to process rank 0\n{RULE}"


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_notices_of_the_launcher_are_set_aside(step):
    text = f"a--{TABLE}b{NOTICE} \n\0rank 1: {NOTICE[:-9]}".encode()
    notices = NoticeFilter()
    passed = b"".join(notices.feed(text[n : n + step]) for n in range(0, len(text), step))
    passed += notices.feed(b"", last=True)
    assert passed.decode() == f"a--{TABLE}brank 1: "
    assert b"".join(notices.notices).decode() == NOTICE + NOTICE[:-9]


@pytest.mark.parametrize(
    ("ranks", "environment", "refused"),
    [
        (16, {}, None),
        (17, {}, "17 ranks are too many for this machine with 2 cores: use at most 16, or"),
        (17, {"SLURM_JOB_ID": "7"}, None),
        (8, {"MEMORY": "2000000"}, r"8 ranks .* with 2.0 GB of free memory.*: use at most 4, or"),
    ],
)
def test_ranks_need_cores_and_memory(ranks, environment, refused, place, monkeypatch):
    """200 ranks on two cores started for minutes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    free = int(environment.pop("MEMORY", "90000000")) * 1000
    monkeypatch.setattr("spatialdl.comm.capacity.available_memory", lambda: free)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_capacity(ranks, oversubscribe=True)
    if refused is None:
        check_capacity(ranks, oversubscribe=False)
    else:
        with pytest.raises(ValueError, match=f"{refused}.*or set comm.oversubscribe=true"):
            check_capacity(ranks, oversubscribe=False)


def test_mpiexec_is_taken_from_the_path_and_its_absence_told(place, monkeypatch):
    (place / "elsewhere").mkdir()
    stand_in(place / "elsewhere", "mpiexec", code=9)
    monkeypatch.setenv("PATH", f"{place / 'elsewhere'}:/usr/bin:/bin")
    assert start_ranks(2, "job", []) == 9
    monkeypatch.setenv("PATH", str(place))
    with pytest.raises(FileNotFoundError, match=r'2 ranks need mpiexec.*"spatialdl\[mpi\]"'):
        start_ranks(2, "job", [])


def test_srun_is_taken_inside_an_allocation(place, monkeypatch):
    stand_in(place, "srun")
    stand_in(place, "mpiexec", code=9)
    for name, value in SLURM_JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    assert start_ranks(3, "job", ["a=1"]) == 0
    arguments, environment = seen(place)
    options = ["-n", "3", "--kill-on-bad-exit=1", "--cpus-per-task=6"]
    assert arguments == [*options, sys.executable, "-m", "job", "a=1"]
    assert environment["OMP_NUM_THREADS"] == "6"
    assert not [argument for argument in arguments if argument.startswith("--mpi")]
    (place / "srun").unlink()
    monkeypatch.setenv("PATH", str(place))
    with pytest.raises(FileNotFoundError, match=r"job 7 is a Slurm allocation.*no srun"):
        start_ranks(3, "job", [])


@pytest.mark.parametrize(
    ("site", "environment", "expected"),
    [
        (("none", "none pmix pmi2"), {}, ["--mpi=pmix"]),
        (("none", "none pmi2"), {}, []),
        (("pmix", "none pmix pmi2"), {}, []),
        (("none", "none pmix pmi2"), {"SLURM_MPI_TYPE": "pmix_v4"}, []),
    ],
)
def test_srun_is_told_the_protocol_where_the_site_has_none(
    place, monkeypatch, site, environment, expected
):
    default, offers = site
    stand_in(place, "srun", offers, ask="--mpi=list")
    stand_in(place, "scontrol", f"MpiDefault   = {default}", ask="show")
    stand_in(place, "python", "Open MPI v5.0.11", ask="-c")
    for name, value in {"SLURM_JOB_ID": "7", **environment}.items():
        monkeypatch.setenv(name, value)
    assert start_ranks(3, "job", []) == 0
    arguments, _ = seen(place)
    assert arguments == ["-n", "3", "--kill-on-bad-exit=1", *expected, *arguments[-3:]]


# --- real ranks

JOB = """
import os, signal
from mpi4py import MPI
world = MPI.COMM_WORLD
pids = world.allgather(os.getpid())
if world.rank == 0:
    print(*pids, flush=True)
signal.pause()
"""
PARENT = """
import sys
from spatialdl.comm import abort
from spatialdl.comm.launch import launched, start_ranks
assert launched() is None
assert "mpi4py.MPI" not in sys.modules, "a process that starts ranks must not be one"
sys.exit(start_ranks(2, "job", []OPTION))
"""


@contextmanager
def parent(
    folder: Path, job: str = JOB, option: str = "", before: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """A process that starts two ranks of a job."""
    (folder / "job.py").write_text(job)
    with subprocess.Popen(
        [sys.executable, "-c", before + PARENT.replace("OPTION", option)],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        (signal.SIGKILL, -9),
    ],
)
def test_no_rank_outlives_the_process_that_started_it(tmp_path, number, code):
    with parent(tmp_path) as process:
        ranks = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        assert len(ranks) == 2
        process.send_signal(number)
        assert process.wait(timeout=250) == code
        for rank in ranks:
            # mpiexec ends them, told by the kernel; in two of five tries it died before, of its own
            # message about that, as nobody could read its standard error any more
            assert select.select([rank], [], [], 100)[0], "a rank is still there"
            os.close(rank)


TO_A_THREAD = """
import signal, sys, threading
def stop():
    sys.stdin.readline()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=stop, daemon=True).start()
"""


def test_a_signal_that_another_thread_gets_is_heard(tmp_path):
    """The kernel gives it the second of two at once: it was lost until the ranks had ended."""
    with parent(tmp_path, before=TO_A_THREAD) as process:
        process.stdout.readline()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(timeout=250) == 143


KILLS = "import os; from mpi4py import MPI; os.kill(os.getppid(), 9)"


def test_a_killed_mpiexec_leaves_nothing_that_a_later_one_would_stumble_over(tmp_path, monkeypatch):
    monkeypatch.delenv(SESSIONS, raising=False)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with parent(tmp_path, KILLS) as process:
        assert process.wait(timeout=250) == 128 + signal.SIGKILL
    assert not list(temporary.iterdir())


STOPS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # also of the threads of MPI
from mpi4py import MPI
from spatialdl.comm.liveness import report_start
world = MPI.COMM_WORLD
report_start(world.rank)
world.Barrier()
if world.rank == 0:
    print("ready", flush=True)
signal.sigwait({signal.SIGUSR1})
"""


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM],
)
def test_ranks_that_stop_by_themselves_end_well(tmp_path, number):
    with parent(tmp_path, STOPS, ", stops=True") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(timeout=250) == 0


def test_a_rank_that_is_killed_is_named_last(tmp_path):
    """Once all have said that they run, which SIGUSR1 waits for."""
    killed = "if world.rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nworld.recv()"
    with parent(tmp_path, f"import os\n{STOPS}\n{killed}", ", stops=True") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=250) == 128 + signal.SIGKILL
        last = process.stderr.read().splitlines()[-1]
    who = rf"error: rank 1 \(process \d+\) on {os.uname().nodename} died without an error message"
    assert re.match(who, last), last


def test_a_second_signal_ends_ranks_that_do_not_stop(tmp_path):
    deaf = STOPS.replace("signal.sigwait({signal.SIGUSR1})", "signal.pause()")
    with parent(tmp_path, deaf, ", stops=True") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=250) in (128 + signal.SIGTERM, 128 + signal.SIGINT)


FAIL = """
import sys
from spatialdl.comm.abort import install_abort_hook
from mpi4py import MPI
install_abort_hook()
who, error = sys.argv[1:]
world = MPI.COMM_WORLD
world.Barrier()
if who in ("all", str(world.rank)):
    raise ValueError("the grid is\\ntoo fine") if error == "mistake" else ZeroDivisionError("oops")
world.recv()
"""


@pytest.mark.parametrize(
    ("who", "error", "first"),
    [
        ("all", "mistake", "rank 0 on {host}: the grid is too fine\n"),
        ("1", "defect", "rank 1 on {host}: Traceback (most recent call last):\n"),
    ],
)
def test_an_error_on_one_rank_ends_the_job(who, error, first):
    done = run("-c", FAIL, who, error, launcher=mpiexec_command(2))
    assert done.returncode != 0
    assert done.stderr.count(first.format(host=os.uname().nodename)) == 1
    assert done.stderr.count(f" on {os.uname().nodename}: ") == 1
    assert ("ZeroDivisionError: oops" in done.stderr) == (error == "defect")


@pytest.mark.parametrize(
    ("environment", "closed"),
    [
        ({}, False),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
        (OPEN_MPI, False),
        ({**SLURM_STEP, "SLURM_STEP_NUM_NODES": "1"}, True),
        ({**SLURM_STEP, "SLURM_STEP_NUM_NODES": "2"}, False),
        ({**SLURM_JOB, "SLURM_STEP_NUM_NODES": "1"}, False),
    ],
)
def test_open_mpi_opens_no_port_on_one_machine(environment, closed):
    given = dict(environment)
    disable_tcp_on_one_machine(given)
    assert given.get("OMPI_MCA_btl") == ("^tcp" if closed else None)
    chosen = {**environment, "OMPI_MCA_btl": "tcp,self"}
    disable_tcp_on_one_machine(chosen)
    assert chosen["OMPI_MCA_btl"] == "tcp,self"


JOB = """
import time
waited = []
time.sleep = waited.append
from spatialdl.comm.launch import initialise_mpi
initialise_mpi()
initialise_mpi()
from mpi4py import MPI
print(MPI.COMM_WORLD.size, MPI.get_vendor()[0], len(waited))
"""


def test_the_first_message_waits_until_open_mpi_is_up_on_all_ranks():
    """A rank that was still in MPI_Init crashed when another one's message came."""
    ranks = 2
    told = run("-c", JOB, launcher=mpiexec_command(ranks))
    lines = told.stdout.splitlines()
    assert len(lines) == ranks
    for line in lines:
        size, *vendor, waits = line.split()
        assert int(waits) == (int(size) > 1 and vendor == ["Open", "MPI"])
