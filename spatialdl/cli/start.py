"""Start of commands with a Hydra configuration: single process, under a launcher, or with ranks.

Started as one process, a command is an ordinary Hydra application, which may launch itself on
several ranks. Started by a launcher, every rank composes the configuration, and all use rank 0's
run directory. In both cases Hydra's records and the log are written here, after the run directory
is locked.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from spatialdl.cli.rank_state import RankState, code, configuration, versions
from spatialdl.comm.abort import exit_with, install_abort_hook
from spatialdl.comm.early_signals import Stopped, let_end
from spatialdl.comm.ending import end_job, forget_run, note_run, record_ending
from spatialdl.comm.launch import LaunchInfo, end_with_launcher, launched
from spatialdl.comm.liveness import print_last, report_start
from spatialdl.comm.waiting import limit_waits
from spatialdl.comm.world import start_world
from spatialdl.common.configuring.overrides import check_overrides, flags_of
from spatialdl.training.console import run_log
from spatialdl.training.run_lock import held

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

_RECORDS = ".hydra"
_CHECKED = "hydra.output_subdir=null"  # has no effect: it is the default of our configuration

# --- processes


def run_single_process(work: Callable[[], object]) -> None:
    """Run a process without a launcher; print errors in one line."""
    try:
        let_end()
        work()
    except Stopped as stop:
        print(stop, file=sys.stderr)
        record_ending(str(stop))
        sys.exit(stop.code)
    except (ValueError, OSError) as error:  # OSError if Hydra cannot create the run directory
        exit_with(error)
    finally:
        forget_run()


@contextmanager
def hydra_job() -> Iterator[Path]:
    """The run directory of this Hydra job, in a process without a launcher.

    An error is printed, recorded in the run's log, and ends the process. The directory, which Hydra
    has created, is removed then if it is empty.
    """
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    note_run(folder=run_dir)
    try:
        yield run_dir
        forget_run(keep=True)
    except Exception as error:
        exit_with(error)
    finally:
        forget_run()


def run_as_rank(work: Callable[[], object]) -> None:
    """Run one of several ranks; its errors abort all ranks."""
    install_abort_hook()
    end_with_launcher()
    info = launched()
    if info is not None:
        report_start(info.rank)
    try:
        work()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print_last(stop.code)
        if stop.code:
            end_job(stop.code if isinstance(stop.code, int) else 1)


# --- the configuration


def check_command_line(flags: Namespace, command: str) -> None:
    """Reject keys that no configuration has.

    Raises:
        ValueError: if there is one.
    """
    elsewhere = flags.config_path is not None or flags.hydra_help or flags.shell_completion
    if not elsewhere:
        overrides, name, folder = flags.overrides, flags.config_name, flags.config_dir
        check_overrides(overrides, command, name, folder, flags.multirun)


def composed_job() -> DictConfig:
    """Configuration of this Hydra job, including the ``hydra`` group."""
    config = HydraConfig.instance().cfg
    assert isinstance(config, DictConfig)
    return config


def config_source_flags() -> list[str]:
    """Flags that reproduce the sources of this job's configuration."""
    job = HydraConfig.get()
    flags = ["--config-name", str(job.job.config_name)]
    for source in job.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", str(source.path)]
    return [*flags, *(o for o in job.overrides.hydra if o.startswith("hydra.searchpath="))]


def run_dir_overrides(run_dir: Path) -> list[str]:
    """Overrides that give ranks this job's directory, and its number in a sweep."""
    quoted = str(run_dir).replace("\\", "\\\\").replace("'", "\\'")
    keys = ("hydra.job.id", "hydra.job.num")
    values = {key: OmegaConf.select(composed_job(), key, throw_on_missing=False) for key in keys}
    numbers = [f"{key}={value}" for key, value in values.items() if value is not None]
    return [f"hydra.run.dir='{quoted}'", *numbers, _CHECKED]


def has_run_dir_overrides(flags: Namespace) -> bool:
    """Whether the starting process passed `run_dir_overrides` to this rank."""
    return _CHECKED in flags.overrides


def composed_for(flags: Namespace, command: str) -> DictConfig:
    """Configuration including the ``hydra`` group, as ``hydra.main`` would compose it."""
    if flags.config_path is not None:
        raise ValueError("--config-path is not supported: pass the folder with --config-dir")
    overrides = list(flags.overrides)
    if flags.config_dir is not None:
        overrides.append(f"hydra.searchpath=['file://{os.path.abspath(flags.config_dir)}']")
    with initialize_config_module("spatialdl.conf", job_name=command, version_base="1.3"):
        return compose(flags.config_name or command, overrides, return_hydra_config=True)


def composed_by_rank(
    info: LaunchInfo, arguments: Sequence[str], command: str, application: Callable[[], object]
) -> tuple[Namespace, DictConfig] | None:
    """Flags of a launched rank, and its configuration including the ``hydra`` group.

    Args:
        info: from the launcher.
        arguments: the command line.
        command: name of the command and of its configuration.
        application: Hydra application, which handles Hydra's information flags on rank 0.

    Returns:
        None if there was such a flag.

    Raises:
        ValueError: if a key is unknown, or several jobs are requested.
    """
    flags = flags_of(arguments, command)
    if flags.hydra_help or flags.info or flags.cfg or flags.shell_completion:
        if info.rank == 0:
            application()
        return None
    if flags.multirun:
        raise ValueError(
            f"--multirun was started on {info.size} ranks, but launches the ranks of its jobs "
            "itself: start it without a launcher"
        )
    if has_run_dir_overrides(flags):  # checked by the starting process
        composed = composed_for(flags, command)
        HydraConfig.instance().set_config(composed)  # for keys that interpolate ${hydra:...}
        return flags, composed
    check_command_line(flags, command)
    return flags, composed_for(flags, command)


def check_same_start(world: Communicator, composed: DictConfig, files: RankState) -> None:
    """Check that all ranks were started with the same configuration and code; collective.

    Args:
        composed: this rank's configuration including the ``hydra`` group.
        files: files that every rank reads independently.

    Raises:
        ValueError: on all ranks, naming the differences and their ranks.
    """
    from spatialdl.comm.agreement import difference

    if world.size == 1:
        return
    subjects = {
        "configuration": configuration(composed),
        "packages": versions(),
        "code": code(without_hydra(composed)),
        "files": files,
    }
    differ = {name: difference(world, subject.items) for name, subject in subjects.items()}
    texts = [f"{name}: {text}: {subjects[name].advice}" for name, text in differ.items() if text]
    if texts:
        raise ValueError(f"ranks differ: {'; '.join(texts)}")


def without_hydra(composed: DictConfig) -> DictConfig:
    """The command's own keys, without the ``hydra`` group."""
    config = composed.copy()
    with open_dict(config):
        del config["hydra"]
    return config


# --- the run directory


@contextmanager
def run_directory(
    world: Communicator, composed: DictConfig, config: DictConfig, command: str
) -> Iterator[tuple[DictConfig, Path]]:
    """Rank 0's configuration and its run directory, locked against other runs.

    Collective on entry and exit. Rank 0 records there how it was started, and logs into a file
    named like the command.

    Args:
        composed: this rank's configuration including the ``hydra`` group.
        config: the command's own keys, as recorded.

    Raises:
        ValueError: on rank 0, if another run has locked the directory, which is left unchanged.
    """
    with ExitStack() as stack:
        run_dir = Path()
        if world.rank == 0:  # only there, as resolving a new directory's name creates it
            run_dir = _run_dir_of(composed)
            stack.enter_context(held(run_dir))
        text, run_dir = world.bcast((OmegaConf.to_yaml(config), run_dir))
        with read_write(composed.hydra.runtime), open_dict(composed.hydra.runtime):
            composed.hydra.runtime.output_dir = str(run_dir)
        HydraConfig.instance().set_config(composed)
        note_run(log=run_dir / f"{command}.log")
        if world.rank == 0:
            _write_records(composed, config, run_dir / _RECORDS)
            stack.enter_context(run_log.log_to_file(run_dir / f"{command}.log"))
        agreed = OmegaConf.create(text)
        OmegaConf.set_struct(agreed, True)
        yield agreed, run_dir
    world.barrier()  # the watchdog does not cover waits in MPI_Finalize


def _run_dir_of(composed: DictConfig) -> Path:
    """Directory of this job, as Hydra resolves it."""
    output_dir = OmegaConf.select(composed, "hydra.runtime.output_dir", throw_on_missing=False)
    return Path(output_dir or composed.hydra.run.dir).absolute()


def _write_records(composed: DictConfig, config: DictConfig, folder: Path) -> None:
    """Write Hydra's records."""
    folder.mkdir(exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml")
    OmegaConf.save(OmegaConf.create({"hydra": composed.hydra}), folder / "hydra.yaml")
    OmegaConf.save(composed.hydra.overrides.task, folder / "overrides.yaml")


# --- a rank


def join_ranks(
    info: LaunchInfo, composed: DictConfig, files: Callable[[DictConfig], RankState]
) -> Communicator:
    """Make this process one of the ranks; collective.

    Args:
        composed: this rank's configuration including the ``hydra`` group.
        files: of a configuration, the files that every rank reads independently.

    Raises:
        ValueError: if ranks were started differently, or the launcher and the transport do not
            fit together.
    """
    from spatialdl.comm.device_path import choose_device_path, device_of

    choose_device(composed, info)
    run_log.start_log(info.rank)
    limit_waits(composed.comm.timeout)
    world = start_world(str(composed.comm.transport))
    check_same_start(world, composed, files(composed))
    choose_device_path(world, device_of(composed.device), str(composed.comm.device_path))
    return world


def choose_device(config: DictConfig, info: LaunchInfo) -> None:
    """Select the accelerator of this rank, before MPI reads the current device.

    With ``ranks_per_device`` consecutive ranks of a node share one. A launcher may expose only one
    device to each rank, so a single one may serve any rank.

    Raises:
        ValueError: if there are several, but none for this rank.
    """
    shared = config.comm.ranks_per_device
    if not isinstance(shared, int) or shared < 1:
        raise ValueError(f"comm.ranks_per_device={shared} must be at least 1")
    if config.device == "cpu":
        return
    import torch

    from spatialdl.comm.device_path import take_device

    if not torch.accelerator.is_available():
        return
    number, count = info.local_rank // shared, torch.accelerator.device_count()
    if number >= count > 1:
        raise ValueError(
            f"rank {info.rank} has local rank {info.local_rank}, but its node has {count} devices: "
            f"start at most {count * shared} ranks per node, or set "
            f"comm.ranks_per_device={-(-(info.local_rank + 1) // count)} or more"
        )
    take_device(number % count)
