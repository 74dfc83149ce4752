"""Ranks: who started this process, and starting several of it.

Whether to start ranks is decided from the launcher's environment, because importing ``mpi4py.MPI``
would already make this process a world of its own. Nothing in this file imports it, but for
`initialise_mpi`, by which a rank starts MPI.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from spatialdl.comm import allocator, early_signals
from spatialdl.comm.liveness import Liveness, say

GRACE_S = 10.0
"""Ranks that were told to stop and have not after this long are killed."""

_STARTED_S = 60.0  # ranks on other machines, which do not answer, have started by then

TERMINAL = "SPATIALDL_TERMINAL"
"""Set for ranks whose output, though it goes through a launcher, ends in a terminal."""

_SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"  # of Open MPI 5, on the machine of its mpiexec
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HEAD_START_S = 0.25


@dataclass(frozen=True)
class LaunchInfo:
    """What the launcher said about this process.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes that were started together.
        local_rank: number of this process among those on its machine.
        launcher: ``mpiexec``, ``srun`` or ``torchrun``.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str


# Launcher, and its variables for rank, size and local rank (of several the first that is set).
# Innermost first: inside a Slurm step may run an mpiexec or a torchrun, inside either a torchrun.
_VARIABLES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "mpiexec",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ),
    (
        "mpiexec",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
    ),
    ("pmi", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "SLURM_LOCALID", "PMI_RANK")),
    ("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",)),
    ("srun", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",)),
)


def launched(environment: Mapping[str, str] | None = None) -> LaunchInfo | None:
    """Rank, size and local rank, or None if no launcher started this process.

    Args:
        environment: where to look; ``os.environ`` by default.
    """
    environment = os.environ if environment is None else environment
    for launcher, *variables in _VARIABLES:
        if launcher != "torchrun" and "TORCHELASTIC_RUN_ID" in environment:
            continue  # what started torchrun, on each host, has left its variables
        if launcher == "srun" and not _in_slurm_step(environment):
            continue
        rank, size, local_rank = (_first_integer(environment, names) for names in variables)
        if rank is not None and size is not None and local_rank is not None:
            names = {"pmi": "srun" if _in_slurm_step(environment) else "mpiexec"}  # both speak it
            return LaunchInfo(rank, size, local_rank, names.get(launcher, launcher))
    return None


def check_mpi_world(size: int, environment: Mapping[str, str] | None = None) -> None:
    """Find out that every process is a world of its own, though several were started together.

    Args:
        size: of ``MPI.COMM_WORLD``.
        environment: of the launcher; ``os.environ`` by default.

    Raises:
        ValueError: if the launcher started another number of ranks than MPI sees.
    """
    environment = os.environ if environment is None else environment
    info = launched(environment)
    if info is None or info.size == size:
        return
    found = f"{info.launcher} started {_ranks(info.size)}, but MPI sees a world of {size}: "
    if info.launcher == "torchrun":
        advice = (
            "take comm.transport=torch, or start it with mpiexec or srun: torchrun sets up no MPI"
        )
    elif _in_slurm_step(environment):
        advice = (
            "srun and this MPI do not speak the same protocol, "
            "take `srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH"
        )
    else:
        advice = (
            "mpiexec belongs to another MPI than the one mpi4py has loaded, take the mpiexec "
            f"of {Path(sys.executable).parent} or of the module that mpi4py was built with"
        )
    raise ValueError(found + advice)


def start_ranks(world_size: int, module: str, arguments: Sequence[str], stops: bool = False) -> int:
    """Run ``python -m module arguments...`` on several ranks and wait for them.

    By ``srun`` inside a Slurm allocation, else by the ``mpiexec`` beside this Python, else by the
    one on the path. Signals are passed on, and the ranks end when this process does.

    Args:
        world_size: number of ranks.
        module: the module to run.
        arguments: its command line.
        stops: whether the ranks end well by themselves after SIGUSR1, which launchers pass on to
            them; for SIGTERM and Ctrl-C mpiexec would kill them. A second signal ends them.

    Returns:
        The exit code of the job: 0 only if all ranks ended well.

    Raises:
        FileNotFoundError: if there is no launcher.
    """
    command, environment = ranks_command(world_size, module, arguments)
    with Liveness(world_size) as ranks, _own_sessions(environment):
        there = ranks.complete if stops else None
        code = _supervise(command, {**environment, **ranks.environment}, there)
    vanished = ranks.vanished()
    if vanished and code and code - 128 not in _ENDING:
        say(f"error: {vanished}")
    return code


def ranks_command(
    world_size: int, module: str, arguments: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The command line of `start_ranks`, and the environment that it runs in.

    Raises:
        FileNotFoundError: if there is no launcher.
    """
    environment = {**os.environ, **allocator.environment()}
    if "SLURM_JOB_ID" in environment and not _in_slurm_step(environment):
        launcher = _srun(world_size)
        environment.setdefault("OMP_NUM_THREADS", environment.get("SLURM_CPUS_PER_TASK", "1"))
    else:
        launcher = mpiexec_command(world_size)
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // world_size)))
        if world_size > cores:
            environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        if sys.stderr.isatty():  # not under srun, which passes on whole lines only
            environment[TERMINAL] = "1"
            environment["COLUMNS"] = str(shutil.get_terminal_size().columns)
    return [*launcher, sys.executable, "-m", module, *arguments], environment


def close_to_others(environment: MutableMapping[str, str] | None = None) -> None:
    """Have Open MPI open no port where all ranks are on one machine; before MPI is imported.

    Its ranks would listen on all networks, for peers that they have not. What a site or a user says
    of its transports stays as it is.

    Args:
        environment: of this rank; ``os.environ`` by default.
    """
    environment = os.environ if environment is None else environment
    size = environment.get("OMPI_COMM_WORLD_SIZE")
    by_mpiexec = size is not None and size == environment.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    by_srun = _in_slurm_step(environment) and environment.get("SLURM_STEP_NUM_NODES") == "1"
    if by_mpiexec or by_srun:
        environment.setdefault("OMPI_MCA_btl", "^tcp")


def end_with_launcher() -> None:
    """Have the kernel kill this rank if its launcher dies, which then cannot do so itself."""
    end = _end_with_parent(signal.SIGKILL)
    if end is not None:
        end()


def _end_with_parent(number: signal.Signals) -> Callable[[], object] | None:
    """What a process calls to get a signal when its parent ends; None where there is no way."""
    if sys.platform != "linux":
        return None
    pr_set_pdeathsig = 1
    return functools.partial(ctypes.CDLL(None).prctl, pr_set_pdeathsig, int(number))


def _srun(world_size: int) -> list[str]:
    if shutil.which("srun") is None:
        raise FileNotFoundError(
            f"job {os.environ['SLURM_JOB_ID']} is a Slurm allocation, but there is no srun on "
            "the path: add Slurm's bin folder to PATH"
        )
    # without the second option the other ranks of an MPICH job wait for a dead one
    command = ["srun", "-n", str(world_size), "--kill-on-bad-exit=1", *_slurm_mpi_type()]
    if "SLURM_CPUS_PER_TASK" in os.environ:  # srun no longer takes it from the allocation
        command.append(f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}")
    return command


def _slurm_mpi_type() -> list[str]:
    """How srun is to introduce the ranks to each other, where neither site nor user says it."""
    if "SLURM_MPI_TYPE" in os.environ:
        return []
    if not re.search(r"MpiDefault\s*=\s*none", _answer("scontrol", "show", "config")):
        return []
    ask = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    library = _answer(sys.executable, "-c", ask + "print(MPI.Get_library_version())")
    wanted = "pmix" if "Open MPI" in library else "pmi2"
    return [f"--mpi={wanted}"] if wanted in _answer("srun", "--mpi=list").split() else []


def mpiexec_command(world_size: int) -> list[str]:
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise FileNotFoundError(
            f"{world_size} ranks need mpiexec, but there is none in {beside.parent} nor on the "
            'path: pip install "spatialdl[mpi]", or load the MPI module of this site'
        )
    return [mpiexec, *_vendor_options(mpiexec), "-n", str(world_size)]


def _vendor_options(mpiexec: str) -> list[str]:
    """What Open MPI needs to be told; MPICH and its kin need nothing."""
    version = re.search(r"Open MPI\D*(\d+)", _answer(mpiexec, "--version"))
    if version is None:
        return []
    # it would bind a rank with all its threads to one core
    options = ["--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    if sys.stderr.isatty() and int(version[1]) >= 5:
        options += ["--stream-buffering", "0"]  # or a progress bar comes when it is over
    return options


@contextmanager
def _own_sessions(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Give Open MPI a new folder for its files of this job, and remove it.

    In a folder of all jobs it names them by process ids only, and refuses to start ("listener
    thread failed to start") where a killed job has left those of an id that has come again.
    """
    if _SESSIONS in environment:
        yield
        return
    with tempfile.TemporaryDirectory("", "spatialdl-mpi-", ignore_cleanup_errors=True) as folder:
        environment[_SESSIONS] = folder
        yield


def _answer(*command: str) -> str:
    """What a program prints, nothing if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout + done.stderr


def _supervise(
    command: Sequence[str], environment: Mapping[str, str], there: threading.Event | None = None
) -> int:
    """Run a launcher, hand every signal on to it, and leave nothing of it behind.

    Args:
        there: given if ranks stop by SIGUSR1, and set once they would hear it.
    """
    child: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        is_first = number in _ENDING and not any(one in _ENDING for one in received)
        received.append(number)
        if child is not None:
            tell(child, signal.SIGUSR1 if is_first and there is not None else number)

    def tell(launcher: subprocess.Popen[bytes], number: int) -> None:
        if there is None or number != signal.SIGUSR1:
            _tell(launcher, number)
        else:  # it would kill a launcher that has just begun
            later = threading.Timer(0, _tell_later, (launcher, number, there))
            later.daemon = True
            later.start()

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    if there is not None:
        received += early_signals.take()
    try:
        # a session of its own, or Ctrl-C would reach the launcher twice
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent(signal.SIGTERM),  # noqa: PLW1509 (one system call)
        )
        for number in received:
            tell(child, number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    ending = [number for number in received if number in _ENDING]
    if ending and not (there is not None and code == 0):
        return 128 + ending[0]
    return code if code >= 0 else 128 - code


def _tell_later(child: subprocess.Popen[bytes], number: int, there: threading.Event) -> None:
    there.wait(_STARTED_S)
    _tell(child, number)


def _tell(child: subprocess.Popen[bytes], number: int) -> None:
    child.send_signal(number)
    if number in _ENDING:
        killer = threading.Timer(GRACE_S, child.kill)
        killer.daemon = True
        killer.start()


def _in_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process; a batch script has no step, or one with a name."""
    return environment.get("SLURM_STEP_ID", "").isdigit()


def _first_integer(environment: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((int(environment[n]) for n in names if environment.get(n, "").isdigit()), None)


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def initialise_mpi() -> None:
    """Initialise MPI; all ranks will have done so before one of them is sent anything.

    Open MPI 5.0 crashes in a rank to which a message comes while it still waits in ``MPI_Init`` for
    the others to get there (github.com/open-mpi/ompi/issues/12495). There is nothing by which they
    could meet before, so the first message waits a moment.
    """
    if "mpi4py.MPI" in sys.modules:
        return
    close_to_others()
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1 and MPI.get_vendor()[0] == "Open MPI":
        time.sleep(_HEAD_START_S)
