"""Detects the launcher of this process, and launches ranks.

The launcher's environment decides whether to start ranks, because importing ``mpi4py.MPI``
would already make this process an MPI world of one rank. Only `initialise_mpi` imports it here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from spatialdl.comm import allocator, early_signals
from spatialdl.comm.capacity import is_one_machine, usable_cores
from spatialdl.comm.ending import record_ending
from spatialdl.comm.launcher_output import LauncherOutput
from spatialdl.comm.liveness import Liveness, print_stderr
from spatialdl.comm.scratch import job_folder
from spatialdl.common.text import counted
from spatialdl.errors import MpiNotFound

GRACE_S = 10.0
"""Ranks that still run after this long since a stop signal are killed."""

_REPORT_S = 0.5  # of a rank that has just started, to arrive
_STARTED_S = 60.0  # by then ranks on other machines, which cannot report, have started

TERMINAL = "SPATIALDL_TERMINAL"
"""Set for ranks whose output ends in a terminal, although it passes through a launcher."""

_SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"  # of Open MPI 5, on the host of mpiexec
_SEGMENTS = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HEAD_START_S = 0.25


@dataclass(frozen=True)
class LaunchInfo:
    """Rank and size of this process from the launcher's environment.

    Attributes:
        rank: rank of this process, from 0.
        size: number of processes started together.
        local_rank: rank of this process on its node.
        launcher: ``mpiexec``, ``srun`` or ``torchrun``.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str


# Launcher, and its variables for rank, size and local rank; of several names the first that is set.
# Innermost first: a Slurm step may run mpiexec or torchrun, and either may run torchrun.
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
        environment: environment to read; ``os.environ`` by default.
    """
    environment = os.environ if environment is None else environment
    for launcher, *variables in _VARIABLES:
        if launcher != "torchrun" and "TORCHELASTIC_RUN_ID" in environment:
            continue  # torchrun inherits the variables of the launcher that started it on each host
        if launcher == "srun" and not _in_slurm_step(environment):
            continue
        rank, size, local_rank = (_first_integer(environment, names) for names in variables)
        if rank is not None and size is not None and local_rank is not None:
            names = {"pmi": "srun" if _in_slurm_step(environment) else "mpiexec"}  # both use PMI
            return LaunchInfo(rank, size, local_rank, names.get(launcher, launcher))
    return None


def check_mpi_world(size: int, environment: Mapping[str, str] | None = None) -> None:
    """Check that MPI and the launcher agree on the number of ranks.

    Args:
        size: size of ``MPI.COMM_WORLD``.
        environment: environment of the launcher; ``os.environ`` by default.

    Raises:
        ValueError: if the launcher started another number of ranks than MPI reports.
    """
    environment = os.environ if environment is None else environment
    info = launched(environment)
    if info is None or info.size == size:
        return
    started = f"{info.launcher} started {counted(info.size, 'rank')}"
    mismatch = f"{started}, but MPI_COMM_WORLD has size {size}: "
    if info.launcher == "torchrun":
        advice = (
            "set comm.transport=torch, or launch with mpiexec or srun; torchrun does not set up MPI"
        )
    elif _in_slurm_step(environment):
        advice = (
            "srun and this MPI use different PMI protocols, "
            "use `srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH"
        )
    else:
        advice = (
            "mpiexec belongs to another MPI than the one that mpi4py loaded, use the mpiexec "
            f"in {Path(sys.executable).parent} or of the module that mpi4py was built with"
        )
    raise ValueError(mismatch + advice)


def start_ranks(
    world_size: int,
    module: str,
    arguments: Sequence[str],
    stops: bool = False,
    log: Path | None = None,
) -> int:
    """Run ``python -m module arguments...`` on several ranks and wait for them.

    Uses ``srun`` inside a Slurm allocation, else the ``mpiexec`` beside this Python, else the
    first on PATH. Signals are forwarded, and the ranks end when this process does. Why a job has
    failed is printed once, last, and appended to the log if the ranks have begun one.

    Args:
        world_size: number of ranks.
        module: module to run.
        arguments: its command line.
        stops: whether ranks exit cleanly on SIGUSR1, which launchers forward; on SIGTERM and
            Ctrl-C mpiexec would kill them. It does so while they start, and on a second signal.
        log: log file of the run.

    Returns:
        Exit code of the job: 0 only if all ranks succeeded.

    Raises:
        FileNotFoundError: if there is no launcher.
    """
    command, environment = ranks_command(world_size, module, arguments)
    with Liveness(world_size) as ranks, _own_folders(environment):
        code, notices = _supervise(
            command, {**environment, **ranks.environment}, ranks if stops else None
        )
    reason = ranks.vanished() if code else None
    if code - 128 in _STOP_SIGNALS:
        reason = None if ranks.explained else f"stopped by {signal.Signals(code - 128).name}"
    elif reason is not None:
        reason = f"error: {reason}"
    elif code and not ranks.explained:
        reason = notices
    if reason is not None and reason.strip():
        print_stderr(reason.strip())
        record_ending(reason, log)
    return code


def ranks_command(
    world_size: int, module: str, arguments: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of `start_ranks`.

    Raises:
        FileNotFoundError: if there is no launcher.
    """
    environment = {**os.environ, **allocator.environment()}
    if _needs_srun(environment):
        launcher = _srun(world_size)
        environment.setdefault("OMP_NUM_THREADS", environment.get("SLURM_CPUS_PER_TASK", "1"))
    else:
        launcher = mpiexec_command(world_size)
        cores = usable_cores()
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // world_size)))
        if world_size > cores:
            environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        if sys.stderr.isatty():  # not under srun, which forwards whole lines only
            environment[TERMINAL] = "1"
            environment["COLUMNS"] = str(shutil.get_terminal_size().columns)
    return [*launcher, sys.executable, "-m", module, *arguments], environment


def program_command(world_size: int) -> str:
    """Command line that starts this program on several ranks, for a message."""
    try:
        in_job = _needs_srun(os.environ)
        launcher = _srun(world_size) if in_job else mpiexec_command(world_size)
    except FileNotFoundError:
        launcher = ["mpiexec", "-n", str(world_size)]
    return shlex.join([*launcher, sys.executable, *sys.orig_argv[1:]])


def disable_tcp_on_one_machine(environment: MutableMapping[str, str] | None = None) -> None:
    """Have Open MPI open no TCP port if all ranks are on one machine; call before importing MPI.

    Its ranks would listen on all networks for peers that do not exist. Transports that the site
    or the user has set are kept.

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
    """Have the kernel kill this rank if its launcher dies."""
    end = _end_with_parent(signal.SIGKILL)
    if end is not None:
        end()


def _end_with_parent(number: signal.Signals) -> Callable[[], object] | None:
    """Call that sends this process a signal when its parent dies; None if unsupported."""
    if sys.platform != "linux":
        return None
    pr_set_pdeathsig = 1
    return functools.partial(ctypes.CDLL(None).prctl, pr_set_pdeathsig, int(number))


def _srun(world_size: int) -> list[str]:
    if shutil.which("srun") is None:
        raise FileNotFoundError(
            f"job {os.environ['SLURM_JOB_ID']} is a Slurm allocation, but there is no srun on "
            "PATH: add Slurm's bin folder to PATH"
        )
    # without the second option the other ranks of an MPICH job wait for a dead rank
    command = ["srun", "-n", str(world_size), "--kill-on-bad-exit=1", *_slurm_mpi_type()]
    if "SLURM_CPUS_PER_TASK" in os.environ:  # srun no longer takes it from the allocation
        command.append(f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}")
    return command


def _slurm_mpi_type() -> list[str]:
    """Option for srun's PMI type if neither the site nor the user sets one."""
    if "SLURM_MPI_TYPE" in os.environ:
        return []
    if not re.search(r"MpiDefault\s*=\s*none", _output_of("scontrol", "show", "config")):
        return []
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    library = _output_of(sys.executable, "-c", code + "print(MPI.Get_library_version())")
    wanted = "pmix" if "Open MPI" in library else "pmi2"
    return [f"--mpi={wanted}"] if wanted in _output_of("srun", "--mpi=list").split() else []


def mpiexec_command(world_size: int) -> list[str]:
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise FileNotFoundError(
            f"{world_size} ranks need mpiexec, which is neither in {beside.parent} nor on PATH: "
            'pip install "spatialdl[mpi]", or load the MPI module of this site'
        )
    return [mpiexec, *_vendor_options(mpiexec), "-n", str(world_size)]


def _vendor_options(mpiexec: str) -> list[str]:
    """Options that Open MPI needs; MPICH and its derivatives need none."""
    version = re.search(r"Open MPI\D*(\d+)", _output_of(mpiexec, "--version"))
    if version is None:
        return []
    # it would bind a rank with all its threads to one core
    options = ["--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    if sys.stderr.isatty() and int(version[1]) >= 5:
        options += ["--stream-buffering", "0"]  # or a progress bar appears only at the end
    return options


@contextmanager
def _own_folders(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Give Open MPI new folders for this job, and remove them afterwards.

    In a folder shared by jobs it names sessions by process id, and fails to start ("listener
    thread failed to start") where a killed job with the same id has left its files. Its shared
    memory stays in /dev/shm if a rank is killed or aborts.
    """
    with ExitStack() as stack:
        if _SESSIONS not in environment:
            environment[_SESSIONS] = stack.enter_context(job_folder(Path(tempfile.gettempdir())))
        shared = Path("/dev/shm")
        is_set = any(name in environment for name in _SEGMENTS)
        if is_one_machine(environment) and not is_set and os.access(shared, os.W_OK):
            folder = stack.enter_context(job_folder(shared))
            environment.update(dict.fromkeys(_SEGMENTS, folder))
        yield


def _output_of(*command: str) -> str:
    """Output of a program, empty if it cannot be run."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return completed.stdout + completed.stderr


def _supervise(
    command: Sequence[str], environment: Mapping[str, str], ranks: Liveness | None = None
) -> tuple[int, str]:
    """Run a launcher, forward signals to it, and leave no process behind.

    Args:
        ranks: given if ranks stop on SIGUSR1, once they all handle it.

    Returns:
        The exit code, and the launcher's notices of a failed job.
    """
    child: subprocess.Popen[bytes] | None = None
    received: list[int] = []
    began = time.monotonic()

    def forward(number: int, _frame: FrameType | None) -> None:
        is_first = number in _STOP_SIGNALS and not any(one in _STOP_SIGNALS for one in received)
        received.append(number)
        if child is not None:
            send(child, number, is_first)

    def send(launcher: subprocess.Popen[bytes], number: int, is_first: bool) -> None:
        # ranks on other machines cannot report that they have started; a report may be on its way
        if (
            ranks is not None
            and is_first
            and (time.monotonic() - began > _STARTED_S or ranks.complete.wait(_REPORT_S))
        ):
            ranks.announce(number)
            number = signal.SIGUSR1
        if ranks is None or number != signal.SIGUSR1:
            _send_signal(launcher, number)
        else:  # it would kill a launcher that has just begun
            delayed = threading.Timer(0, _send_when_started, (launcher, number, ranks.complete))
            delayed.daemon = True
            delayed.start()

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    received += early_signals.take()
    try:
        for number in received:
            if number in _STOP_SIGNALS:
                return 128 + number, ""
        output = LauncherOutput()
        # a new session, or Ctrl-C would reach the launcher twice
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent(signal.SIGTERM),  # noqa: PLW1509 (one system call)
            **output.of_child(),
        )
        output.start()
        for number in received:
            send(child, number, is_first=number in _STOP_SIGNALS)
        code = _ended(child)
        notices = output.close()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    stop_signals = [number for number in received if number in _STOP_SIGNALS]
    if stop_signals and not (ranks is not None and code == 0):
        return 128 + stop_signals[0], notices
    return (code if code >= 0 else 128 - code), notices


def _ended(child: subprocess.Popen[bytes]) -> int:
    """Exit code of a process, once it has ended.

    Of two signals at once the kernel may give the second to another thread, which does not wake
    this one: waiting without an end, it would handle that signal only when the process has ended.
    """
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(0.5)


def _send_when_started(
    child: subprocess.Popen[bytes], number: int, all_started: threading.Event
) -> None:
    all_started.wait(_STARTED_S)
    _send_signal(child, number)


def _send_signal(child: subprocess.Popen[bytes], number: int) -> None:
    child.send_signal(number)
    if number in _STOP_SIGNALS:
        killer = threading.Timer(GRACE_S, child.kill)
        killer.daemon = True
        killer.start()


def _needs_srun(environment: Mapping[str, str]) -> bool:
    """Whether this process is in a Slurm allocation, but not in a step of it."""
    return "SLURM_JOB_ID" in environment and not _in_slurm_step(environment)


def _in_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process; a batch script has no numeric step id."""
    return environment.get("SLURM_STEP_ID", "").isdigit()


def _first_integer(environment: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((int(environment[n]) for n in names if environment.get(n, "").isdigit()), None)


def initialise_mpi() -> None:
    """Initialise MPI, and wait until other ranks are likely to have done so.

    Open MPI 5.0 crashes in a rank that receives a message while it still waits in ``MPI_Init`` for
    other ranks (github.com/open-mpi/ompi/issues/12495). No synchronisation is available before,
    so the first message is delayed by a fixed time.

    Raises:
        MpiNotFound: mpi4py cannot load an MPI library.
    """
    if "mpi4py.MPI" in sys.modules:
        return
    disable_tcp_on_one_machine()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = "; ".join(str(error).split("\n")[:2])
        raise MpiNotFound(
            f'mpi4py finds no MPI ({reason}): pip install "spatialdl[mpi]", or load the MPI '
            "module of this site"
        ) from None
    if MPI.COMM_WORLD.size > 1 and MPI.get_vendor()[0] == "Open MPI":
        time.sleep(_HEAD_START_S)
