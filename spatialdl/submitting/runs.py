"""Handing runs to Slurm: those of a sweep together, with a table of where they went.

submitit writes the script, calls sbatch and reads the number of the job. It would also pickle a
function, to be loaded in the job; here the script has the command lines, and Slurm keeps a copy.
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

from spatialdl.starting import into, sources
from spatialdl.submitting.resources import Options, resources
from spatialdl.text import aligned, counted
from spatialdl.training.checks import check_config
from spatialdl.training.image_size import check_stored_size

if TYPE_CHECKING:
    from submitit import SlurmExecutor

log = logging.getLogger("spatialdl.slurm")

FOLDER = "slurm"
"""In the run or sweep directory: scripts, what jobs say, and the table."""

_COLUMNS = ("job", "ranks", "overrides", "run directory", "log")
_gathered: ContextVar[list[SubmittedRun] | None] = ContextVar("gathered", default=None)


@dataclass(frozen=True)
class SubmittedRun:
    """What becomes a job.

    Attributes:
        overrides: of the user, without those of the launcher.
        words: the command line of its ranks.
        run_dir: of the run.
        ranks: that its layout has.
        requeue: how many times it may go back into the queue.
        options: of sbatch.
        setup: shell lines before the ranks start.
        at_once: jobs of an array that may run at the same time; None: all.
    """

    overrides: tuple[str, ...]
    words: tuple[str, ...]
    run_dir: Path
    ranks: int
    requeue: int
    options: Options
    setup: tuple[str, ...]
    at_once: int | None


def hand_in(config: DictConfig, overrides: Sequence[str], run_dir: Path) -> None:
    """Submit a run, after a look at what would fail in its job; those of a sweep wait for all.

    Args:
        config: of the run, with ``launcher=slurm``.
        overrides: it was composed with.
        run_dir: where its records lie already.

    Raises:
        ValueError: if something would fail, or there is no Slurm; with what Slurm says.
    """
    runs = _gathered.get()
    try:
        _check_place()
        run = _run_of(config, overrides, run_dir)
    except ValueError as error:
        if runs is not None:
            error.add_note(f"(of the sweep's run {' '.join(overrides)}; none was submitted)")
        raise
    if runs is None:
        submit([run], run_dir)
    else:
        runs.append(run)


@contextmanager
def gathered() -> Iterator[list[SubmittedRun]]:
    """Keep what is handed in, for `submit`."""
    runs: list[SubmittedRun] = []
    token = _gathered.set(runs)
    try:
        yield runs
    finally:
        _gathered.reset(token)


def submit(runs: Sequence[SubmittedRun], folder: Path) -> None:
    """Submit runs, those that ask for the same as an array, and say where they went.

    Args:
        runs: to be submitted.
        folder: of the run or of the sweep; scripts and logs go to ``slurm`` in it.

    Raises:
        ValueError: with what sbatch says.
    """
    folder = (folder / FOLDER).absolute()
    if "%" in str(folder):
        raise ValueError(f"{folder} has a %, which Slurm would replace: take another hydra.run.dir")
    folder.mkdir(parents=True, exist_ok=True)
    alike: dict[object, list[SubmittedRun]] = {}
    for run in runs:
        alike.setdefault((run.options, run.setup, run.at_once), []).append(run)
    jobs: list[tuple[str, SubmittedRun]] = []
    try:
        for some in alike.values():
            jobs += zip(_submit_alike(some, folder), some, strict=True)
    finally:
        if jobs:
            _tell(jobs, folder)


def script(runs: Sequence[SubmittedRun]) -> str:
    """The shell lines of a job that is one of several runs.

    The number of the job in the array says which; a job alone has none.
    """
    lines = ["case ${SLURM_ARRAY_TASK_ID:-0} in"]
    for number, run in enumerate(runs):
        words = [f"--ranks={run.ranks}", f"--requeue={run.requeue}", str(run.run_dir), *run.words]
        lines.append(f"{number}) set -- {shlex.join(words)} ;;")
    lines += ["esac", "trap '' USR1  # of scancel --full: it is the ranks that leave"]
    command = f"exec {shlex.quote(sys.executable)} -u -m spatialdl.submitting.job"
    return "\n".join([*lines, f'{command} "$@"'])


def _check_place() -> None:
    if "SLURM_JOB_ID" in os.environ:
        raise ValueError(
            f"launcher=slurm submits jobs, but this is inside of job {os.environ['SLURM_JOB_ID']}: "
            "leave it out to start the ranks in this allocation, or start it outside"
        )
    if shutil.which("sbatch") is None:
        raise ValueError(
            "launcher=slurm submits by sbatch, but there is none on the path: load the module of "
            "Slurm or add its bin folder to PATH, or leave launcher=slurm out to train here"
        )
    _executor(Path())


def _run_of(config: DictConfig, overrides: Sequence[str], run_dir: Path) -> SubmittedRun:
    if config.debug.name == "fakecomm":
        raise ValueError("debug=fakecomm runs nothing that needs a job: leave launcher=slurm out")
    ranks = _ranks_of(config)
    launcher = config.launcher
    own = [word for word in overrides if not re.match(r"[+~]*launcher(=|\.|@|$)", word)]
    return SubmittedRun(
        overrides=tuple(own),
        words=(*sources(), *own, "launcher=local", *into(run_dir)),
        run_dir=run_dir,
        ranks=ranks,
        requeue=launcher.requeue,
        options=resources(launcher, ranks),
        setup=tuple(launcher.setup),
        at_once=launcher.at_once,
    )


def _ranks_of(config: DictConfig) -> int:
    """Those that the layout has; one that is found inside the job has the user's number."""
    if config.parallel.name != "auto":
        placement = check_config(config)
        check_stored_size(config.data, placement)
        return placement.world_size
    world = config.parallel.world
    if not isinstance(world, int) or world < 1:
        raise ValueError("parallel=auto does not know for how many ranks: add parallel.world=...")
    return world


def _executor(folder: Path) -> SlurmExecutor:
    try:
        from submitit import SlurmExecutor
    except ImportError as error:
        raise ValueError('launcher=slurm needs submitit: pip install "spatialdl[slurm]"') from error

    class Executor(SlurmExecutor):
        def _num_tasks(self) -> int:
            return 1  # that submitit knows of: the script; nodes may be unknown here

    try:
        return Executor(folder)
    except RuntimeError as error:  # it looks for srun
        raise ValueError(f"launcher=slurm: {error}") from error


def _submit_alike(runs: Sequence[SubmittedRun], folder: Path) -> list[str]:
    """The numbers of the jobs of runs that ask for the same."""
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
        use_srun=False,  # the command does that itself
        nodes=None,
        time=None,
        wckey=None,  # which a site would have to know
    )
    if is_array:
        executor.parameters["map_count"] = len(runs)
    try:
        with redirect_stderr(io.StringIO()):  # submitit prints what it raises, too
            number = str(executor._submit_command(script(runs)).job_id)
    except FailedJobError as error:
        raise ValueError(f"sbatch refuses the job: {error}") from error
    except (FailedSubmissionError, OSError) as error:
        raise ValueError(f"sbatch: {error}") from error
    for link in folder.glob(".submission_file_*.sh"):
        if link.is_symlink():  # to the script, which submitit has named like the job
            link.unlink(missing_ok=True)
    return [f"{number}_{task}" for task in range(len(runs))] if is_array else [number]


def _tell(jobs: Sequence[tuple[str, SubmittedRun]], folder: Path) -> None:
    """The table on the terminal, with what differs, and whole in a file that outlasts it."""
    runs = [run for _, run in jobs]
    in_all = set.intersection(*(set(run.overrides) for run in runs)) if len(runs) > 1 else set()
    rows, short = [], []
    for job, run in jobs:
        log_file = folder / f"{job}.log"
        rows.append((job, run.ranks, " ".join(run.overrides), run.run_dir, log_file))
        own = " ".join(word for word in run.overrides if word not in in_all)
        short.append((job, str(run.ranks), own, _short(run.run_dir), _short(log_file)))
    file = folder / "jobs.csv"
    is_new = not file.exists()
    with file.open("a", newline="") as lines:
        csv.writer(lines).writerows([_COLUMNS, *rows] if is_new else rows)
    log.info("%s submitted, listed in %s", counted(len(rows), "job"), _short(file))
    print("\n".join(aligned([_COLUMNS, *short], left=(0, 2, 3, 4))))
    numbers = list(dict.fromkeys(job.partition("_")[0] for job, _ in jobs))
    print(f"look at them: squeue -j {','.join(numbers)}; end them: scancel {' '.join(numbers)}")


def _short(path: Path) -> str:
    """As seen from here, if it lies here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
