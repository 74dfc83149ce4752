"""Submission of runs to Slurm: the runs of a sweep together, with a table of jobs and paths.

submitit writes the script, calls sbatch and parses the job id. It normally pickles a function that
the job loads; here the script contains the command lines, and Slurm keeps a copy.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from spatialdl.commands.start import config_source_flags, run_dir_overrides
from spatialdl.submitting.resources import Options, resources
from spatialdl.text import aligned, counted
from spatialdl.training.checks import check_config, check_stored_size

if TYPE_CHECKING:
    from submitit import SlurmExecutor

log = logging.getLogger("spatialdl.slurm")

FOLDER = "slurm"
"""In the run or sweep directory: scripts, logs of jobs, and the table."""

_COLUMNS = ("job", "ranks", "overrides", "run directory", "log")
_gathered: ContextVar[list[SubmittedRun] | None] = ContextVar("gathered", default=None)


@dataclass(frozen=True)
class SubmittedRun:
    """A run to submit as a job.

    Attributes:
        overrides: the user's overrides, without those of the launcher.
        words: command line of its ranks.
        run_dir: run directory.
        ranks: number of ranks of its layout.
        requeue: maximum number of restarts.
        options: sbatch options.
        setup: shell lines before the ranks start.
        at_once: maximum number of concurrent jobs of an array; None for no limit.
    """

    overrides: tuple[str, ...]
    words: tuple[str, ...]
    run_dir: Path
    ranks: int
    requeue: int
    options: Options
    setup: tuple[str, ...]
    at_once: int | None


def submit_run(config: DictConfig, overrides: Sequence[str], run_dir: Path) -> None:
    """Check and submit a run; runs of a sweep are collected for `submit`.

    Args:
        config: configuration of the run, with ``launcher=slurm``.
        overrides: its overrides.
        run_dir: run directory, which has its records already.

    Raises:
        ValueError: if the run would fail, Slurm is missing, or sbatch fails; with its message.
    """
    runs = _gathered.get()
    try:
        _check_place()
        run = _run_of(config, overrides, run_dir)
    except ValueError as error:
        if runs is not None:
            error.add_note(f"(run {' '.join(overrides)} of the sweep; none was submitted)")
        raise
    if runs is None:
        submit([run], run_dir)
    else:
        runs.append(run)


@contextmanager
def gathered() -> Iterator[list[SubmittedRun]]:
    """Context that collects the runs of a sweep, for `submit`."""
    runs: list[SubmittedRun] = []
    token = _gathered.set(runs)
    try:
        yield runs
    finally:
        _gathered.reset(token)


def submit(runs: Sequence[SubmittedRun], folder: Path) -> None:
    """Submit runs, those with equal options as an array, and print a table.

    Args:
        runs: runs to submit.
        folder: directory of the run or sweep; scripts and logs are written to its ``slurm``.

    Raises:
        ValueError: if sbatch fails, with its message.
    """
    folder = (folder / FOLDER).absolute()
    if "%" in str(folder):
        raise ValueError(f"{folder} contains %, which Slurm expands: set another hydra.run.dir")
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[object, list[SubmittedRun]] = {}
    for run in runs:
        groups.setdefault((run.options, run.setup, run.at_once), []).append(run)
    jobs: list[tuple[str, SubmittedRun]] = []
    try:
        for group in groups.values():
            jobs += zip(_submit_group(group, folder), group, strict=True)
    finally:
        if jobs:
            _print_table(jobs, folder)


def script(runs: Sequence[SubmittedRun]) -> str:
    """Shell lines of a job that executes one of several runs.

    The array index selects the run; a single job has none.
    """
    lines = ["case ${SLURM_ARRAY_TASK_ID:-0} in"]
    for number, run in enumerate(runs):
        words = [f"--ranks={run.ranks}", f"--requeue={run.requeue}", str(run.run_dir), *run.words]
        lines.append(f"{number}) set -- {shlex.join(words)} ;;")
    lines += ["esac", "trap '' USR1  # of scancel --full, which the ranks handle"]
    command = f"exec {shlex.quote(sys.executable)} -u -m spatialdl.submitting.job"
    return "\n".join([*lines, f'{command} "$@"'])


def _check_place() -> None:
    if "SLURM_JOB_ID" in os.environ:
        raise ValueError(
            f"launcher=slurm submits jobs, but this is inside job {os.environ['SLURM_JOB_ID']}: "
            "omit it to start the ranks in this allocation, or run the command outside"
        )
    if shutil.which("sbatch") is None:
        raise ValueError(
            "launcher=slurm needs sbatch, which is not on PATH: load the Slurm module or add its "
            "bin folder to PATH, or omit launcher=slurm to train here"
        )
    _executor(Path())


def _run_of(config: DictConfig, overrides: Sequence[str], run_dir: Path) -> SubmittedRun:
    if config.debug.name == "fakecomm":
        raise ValueError("debug=fakecomm needs no job: omit launcher=slurm")
    ranks = _ranks_of(config)
    launcher = config.launcher
    own = [word for word in overrides if not re.match(r"[+~]*launcher(=|\.|@|$)", word)]
    return SubmittedRun(
        overrides=tuple(own),
        words=(*config_source_flags(), *own, "launcher=local", *run_dir_overrides(run_dir)),
        run_dir=run_dir,
        ranks=ranks,
        requeue=launcher.requeue,
        options=resources(launcher, ranks),
        setup=tuple(launcher.setup),
        at_once=launcher.at_once,
    )


def _ranks_of(config: DictConfig) -> int:
    """Number of ranks of the layout; of ``parallel=auto`` the user's ``parallel.world``."""
    if config.parallel.name != "auto":
        placement = check_config(config)
        check_stored_size(config.data, config.parallel)
        return placement.world_size
    world = config.parallel.world
    if not isinstance(world, int) or world < 1:
        raise ValueError("parallel=auto needs a number of ranks: add parallel.world=...")
    return world


def _executor(folder: Path) -> SlurmExecutor:
    try:
        from submitit import SlurmExecutor
    except ImportError as error:
        raise ValueError('launcher=slurm needs submitit: pip install "spatialdl[slurm]"') from error

    class Executor(SlurmExecutor):
        def _num_tasks(self) -> int:
            return 1  # submitit's task is the script; the number of nodes may be unknown

    try:
        return Executor(folder)
    except RuntimeError as error:  # submitit requires srun
        raise ValueError(f"launcher=slurm: {error}") from error


def _submit_group(runs: Sequence[SubmittedRun], folder: Path) -> list[str]:
    """Submit runs with equal options; return their job ids."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    first = runs[0]
    is_array = len(runs) > 1
    output = folder / ("%A_%a.log" if is_array else "%j.log")
    more: dict[str, Any] = {"job_name": "spatialdl", **dict(first.options), "output": str(output)}
    executor = _executor(folder)
    executor.update_parameters(
        additional_parameters=more,
        setup=list(first.setup),
        array_parallelism=first.at_once or len(runs),
        stderr_to_stdout=True,
        use_srun=False,  # the command calls srun itself
        nodes=None,
        time=None,
        wckey=None,  # rejected by sites without wckeys
    )
    if is_array:
        executor.parameters["map_count"] = len(runs)
    try:
        with redirect_stderr(io.StringIO()):  # submitit also prints what it raises
            number = str(executor._submit_command(script(runs)).job_id)
    except FailedJobError as error:
        raise ValueError(f"sbatch rejected the job: {error}") from error
    except (FailedSubmissionError, OSError) as error:
        raise ValueError(f"sbatch: {error}") from error
    for link in folder.glob(".submission_file_*.sh"):
        if link.is_symlink():  # to the script, which submitit names like the job
            link.unlink(missing_ok=True)
    return [f"{number}_{task}" for task in range(len(runs))] if is_array else [number]


def _print_table(jobs: Sequence[tuple[str, SubmittedRun]], folder: Path) -> None:
    """Print the table with the differing overrides, and append the full table to a file."""
    runs = [run for _, run in jobs]
    common = set.intersection(*(set(run.overrides) for run in runs)) if len(runs) > 1 else set()
    rows, short = [], []
    for job, run in jobs:
        log_file = folder / f"{job}.log"
        rows.append((job, run.ranks, " ".join(run.overrides), run.run_dir, log_file))
        own = " ".join(word for word in run.overrides if word not in common)
        short.append((job, str(run.ranks), own, _short(run.run_dir), _short(log_file)))
    file = folder / "jobs.csv"
    is_new = not file.exists()
    with file.open("a", newline="") as lines:
        csv.writer(lines).writerows([_COLUMNS, *rows] if is_new else rows)
    log.info("%s submitted, listed in %s", counted(len(rows), "job"), _short(file))
    print("\n".join(aligned([_COLUMNS, *short], left=(0, 2, 3, 4))))
    numbers = list(dict.fromkeys(job.partition("_")[0] for job, _ in jobs))
    print(f"status: squeue -j {','.join(numbers)}; cancel: scancel {' '.join(numbers)}")


def _short(path: Path) -> str:
    """Path relative to the working directory, if inside."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
