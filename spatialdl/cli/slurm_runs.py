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

from omegaconf import DictConfig, OmegaConf

from spatialdl.cli.start import config_source_flags, run_dir_overrides
from spatialdl.common.text import aligned, counted
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
    command = f"exec {shlex.quote(sys.executable)} -u -m spatialdl.cli.slurm_job"
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


Options = tuple[tuple[str, object], ...]
"""sbatch options in order, ``True`` for flags; runs with equal options share an array."""

_COUNTS = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_task", "at_once")
_KEYS = {
    **{name: name for name in ("account", "partition", "time", "nodes", "requeue", "signal")},
    **{"ntasks_per_node": "tasks_per_node", "no_requeue": "requeue"},
    **{name: name for name in ("cpus_per_task", "gpus_per_task")},
}
_OURS = {option: f"launcher.{key} sets it" for option, key in _KEYS.items()} | {
    "array": "a sweep is an array, launcher.at_once limits it",
    "error": "the table lists the log files of jobs",
    "ntasks": "the layout determines the number of ranks",
    "open_mode": "a resumed job appends to its log",
    "output": "the table lists the log files of jobs",
    "wrap": "a job is a run",
}
"""Options that ``launcher.options`` must not contain, with the reason."""


def resources(launcher: DictConfig, ranks: int) -> Options:
    """sbatch options of a job.

    Args:
        launcher: settings of ``launcher=slurm``.
        ranks: number of ranks of the layout.

    Raises:
        ValueError: if a setting is invalid, or the ranks do not fit on the nodes.
    """
    _check(launcher)
    nodes, each = on_nodes(ranks, launcher.nodes, launcher.tasks_per_node)
    options: dict[str, Any] = {
        "account": launcher.account,
        "cpus_per_task": launcher.cpus_per_task,
        "gpus_per_task": launcher.gpus_per_task,
        "nodes": nodes,
        "ntasks": ranks,
        "ntasks_per_node": each,
        "partition": launcher.partition,
        "signal": f"USR1@{launcher.signal}",  # without B: to the ranks, not to the script
        "time": launcher.time,
        ("requeue" if launcher.requeue else "no_requeue"): True,
    }
    options |= dict(_option(text) for text in launcher.options)
    return tuple((key, value) for key, value in sorted(options.items()) if value is not None)


def on_nodes(ranks: int, nodes: int | None, each: int | None) -> tuple[int | None, int | None]:
    """Number of nodes, and maximum ranks per node; None is left to Slurm.

    Raises:
        ValueError: if the ranks do not fit, with the numbers.
    """
    if nodes is None and each is None:
        return None, None
    if nodes is None and each is not None:
        each = min(each, ranks)
        return -(-ranks // each), each
    assert nodes is not None
    if nodes > ranks:
        raise ValueError(
            f"launcher.nodes={nodes}, but the layout has {counted(ranks, 'rank')}: "
            f"use at most {ranks}"
        )
    if each is None:
        return nodes, -(-ranks // nodes)
    if nodes * each < ranks:
        raise ValueError(
            f"the layout has {counted(ranks, 'rank')}, but launcher.nodes={nodes} x "
            f"launcher.tasks_per_node={each} = {nodes * each}: omit one of them"
        )
    return nodes, min(each, ranks)


def _check(launcher: DictConfig) -> None:
    for key in _COUNTS:
        value = launcher[key]
        if value is not None and (not _is_integer(value) or value < 1):
            raise ValueError(f"launcher.{key}={value} must be at least 1, or null")
    for key, least in (("signal", 1), ("requeue", 0)):
        value = launcher[key]
        if not _is_integer(value) or value < least:
            raise ValueError(f"launcher.{key}={value} must be at least {least}")
    for key in ("partition", "account", "time"):
        _check_words(f"launcher.{key}", launcher[key])
    for key, what in (("setup", "shell lines"), ("options", "options such as --qos=long")):
        value = launcher[key]
        if not OmegaConf.is_list(value) or not all(isinstance(one, str) for one in value):
            raise ValueError(f"launcher.{key}={value} must be a list of {what}")


def _option(text: str) -> tuple[str, object]:
    """Parse one of ``launcher.options``, named as in submitit: ``mem_per_cpu``."""
    match = re.fullmatch(r"--([a-z][a-z-]*)(?:=(.+))?", text)
    if match is None or not text.isprintable():
        raise ValueError(f"launcher.options has {text!r}: write options as --qos=long")
    name = match[1].replace("-", "_")
    if name in _OURS:
        raise ValueError(f"launcher.options has {text}: omit it, {_OURS[name]}")
    return name, match[2] or True


def _check_words(key: str, value: object) -> None:
    """Reject anything but a word; a line break would inject a line into the script."""
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError(f"{key}={value} must be a word or a number")
    if not str(value).isprintable():
        raise ValueError(f"{key}={value!r} must be one line")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
