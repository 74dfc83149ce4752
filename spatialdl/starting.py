"""How commands with a Hydra configuration start: alone, under a launcher, or on ranks they start.

Started as one process, a command is an ordinary Hydra application, which may start itself again on
several ranks. Started by a launcher, every rank composes the configuration, and all take rank 0's
run directory. Either way what Hydra would write there first, its records and the log, is written
here, once no other run has the directory.
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

from spatialdl.comm.abort import describe_error, install_abort_hook
from spatialdl.comm.ending import end_job
from spatialdl.comm.launch import LaunchInfo, end_with_launcher, launched
from spatialdl.comm.limit import limit_waits
from spatialdl.comm.liveness import answer
from spatialdl.comm.world import start_world
from spatialdl.configuring.overrides import check_overrides, flags_of
from spatialdl.consistency.compare import check_alike
from spatialdl.consistency.rank_state import RankState, code, configuration, versions
from spatialdl.training.console import run_log
from spatialdl.training.run_lock import held

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

_RECORDS = ".hydra"
_CHECKED = "hydra.output_subdir=null"  # changes nothing: that is so in our files

# --- processes


def alone(work: Callable[[], object]) -> None:
    """Run a process that no launcher has started; what goes wrong is one line."""
    try:
        work()
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except (ValueError, OSError) as error:  # or Hydra cannot make the run directory
        print(f"error: {describe_error(error)}", file=sys.stderr)
        sys.exit(1)


def as_rank(work: Callable[[], object]) -> None:
    """Run one of several ranks: what goes wrong on it ends all."""
    install_abort_hook()
    end_with_launcher()
    info = launched()
    if info is not None:
        answer(info.rank)
    try:
        work()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        if stop.code:
            end_job(stop.code if isinstance(stop.code, int) else 1)


# --- the configuration


def check_words(flags: Namespace, command: str) -> None:
    """Refuse what no configuration knows.

    Raises:
        ValueError: if there is something.
    """
    elsewhere = flags.config_path is not None or flags.hydra_help or flags.shell_completion
    if not elsewhere:
        overrides, name, folder = flags.overrides, flags.config_name, flags.config_dir
        check_overrides(overrides, command, name, folder, flags.multirun)


def composed_job() -> DictConfig:
    """The configuration of this job of Hydra with Hydra's part."""
    found = HydraConfig.instance().cfg
    assert isinstance(found, DictConfig)
    return found


def sources() -> list[str]:
    """The flags that say where this job's configuration came from."""
    job = HydraConfig.get()
    flags = ["--config-name", str(job.job.config_name)]
    for source in job.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", str(source.path)]
    return [*flags, *(o for o in job.overrides.hydra if o.startswith("hydra.searchpath="))]


def into(run_dir: Path) -> list[str]:
    """Overrides that send ranks to this job's directory, with its number in a sweep."""
    quoted = str(run_dir).replace("\\", "\\\\").replace("'", "\\'")
    keys = ("hydra.job.id", "hydra.job.num")
    found = {key: OmegaConf.select(composed_job(), key, throw_on_missing=False) for key in keys}
    numbers = [f"{key}={value}" for key, value in found.items() if value is not None]
    return [f"hydra.run.dir='{quoted}'", *numbers, _CHECKED]


def was_sent(flags: Namespace) -> bool:
    """Whether the process that started this rank has used `into`."""
    return _CHECKED in flags.overrides


def composed_for(flags: Namespace, command: str) -> DictConfig:
    """The configuration with Hydra's own part, as ``hydra.main`` would make it."""
    if flags.config_path is not None:
        raise ValueError("--config-path is not known here: name the folder with --config-dir")
    overrides = list(flags.overrides)
    if flags.config_dir is not None:
        overrides.append(f"hydra.searchpath=['file://{os.path.abspath(flags.config_dir)}']")
    with initialize_config_module("spatialdl.conf", job_name=command, version_base="1.3"):
        return compose(flags.config_name or command, overrides, return_hydra_config=True)


def composed_by_rank(
    info: LaunchInfo, arguments: Sequence[str], command: str, application: Callable[[], object]
) -> tuple[Namespace, DictConfig] | None:
    """The flags of a rank that a launcher has started, and its configuration with Hydra's part.

    Args:
        info: of the launcher.
        arguments: of the command line.
        command: that is started, with a configuration of this name.
        application: Hydra's, which answers questions of its own in rank 0.

    Returns:
        Nothing if there was such a question.

    Raises:
        ValueError: if something is unknown, or several jobs are asked for.
    """
    flags = flags_of(arguments, command)
    if flags.hydra_help or flags.info or flags.cfg or flags.shell_completion:
        if info.rank == 0:
            application()
        return None
    if flags.multirun:
        raise ValueError(
            f"--multirun was started on {info.size} ranks, but starts the ranks of its jobs "
            "itself: leave the launcher out"
        )
    if was_sent(flags):  # the one that starts ranks has looked
        composed = composed_for(flags, command)
        HydraConfig.instance().set_config(composed)  # for keys that refer to the job
        return flags, composed
    check_words(flags, command)
    return flags, composed_for(flags, command)


def check_same_start(world: Communicator, composed: DictConfig, files: RankState) -> None:
    """Refuse ranks that were started with different things; all of them must call it.

    Args:
        composed: this rank's configuration with Hydra's part.
        files: that every rank reads for itself.

    Raises:
        ValueError: on all ranks, telling what differs and which ranks have which.
    """
    if world.size == 1:
        return
    subjects = {
        "configuration": configuration(composed),
        "packages": versions(),
        "code": code(without_hydra(composed)),
        "files": files,
    }
    check_alike(world, subjects)


def without_hydra(composed: DictConfig) -> DictConfig:
    """The command's own keys."""
    config = composed.copy()
    with open_dict(config):
        del config["hydra"]
    return config


# --- the run directory


@contextmanager
def run_directory(
    world: Communicator, composed: DictConfig, config: DictConfig, command: str
) -> Iterator[tuple[DictConfig, Path]]:
    """Rank 0's configuration and its run directory, to which no other run writes meanwhile.

    All ranks enter it, and leave it together. Rank 0 writes there how it was started, and logs into
    a file named like the command.

    Args:
        composed: this rank's configuration with Hydra's part.
        config: the command's own keys, as they are to be recorded.

    Raises:
        ValueError: on rank 0, if another run has the directory; there is nothing changed then.
    """
    with ExitStack() as stack:
        run_dir = Path()
        if world.rank == 0:  # only there: to resolve the name of a new folder makes it
            run_dir = _place_of(composed)
            stack.enter_context(held(run_dir))
        text, run_dir = world.bcast((OmegaConf.to_yaml(config), run_dir))
        with read_write(composed.hydra.runtime), open_dict(composed.hydra.runtime):
            composed.hydra.runtime.output_dir = str(run_dir)
        HydraConfig.instance().set_config(composed)
        if world.rank == 0:
            _write_records(composed, config, run_dir / _RECORDS)
            stack.enter_context(run_log.log_to_file(run_dir / f"{command}.log"))
        agreed = OmegaConf.create(text)
        OmegaConf.set_struct(agreed, True)
        yield agreed, run_dir
    world.barrier()  # nobody watches over ranks that wait for each other in the end of MPI


def _place_of(composed: DictConfig) -> Path:
    """Where Hydra has this job, or would have it."""
    found = OmegaConf.select(composed, "hydra.runtime.output_dir", throw_on_missing=False)
    return Path(found or composed.hydra.run.dir).absolute()


def _write_records(composed: DictConfig, config: DictConfig, folder: Path) -> None:
    """What Hydra would write."""
    folder.mkdir(exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml")
    OmegaConf.save(OmegaConf.create({"hydra": composed.hydra}), folder / "hydra.yaml")
    OmegaConf.save(composed.hydra.overrides.task, folder / "overrides.yaml")


# --- a rank


def meet(
    info: LaunchInfo, composed: DictConfig, files: Callable[[DictConfig], RankState]
) -> Communicator:
    """Make this process one of the ranks, which are to have been started with the same things.

    Args:
        composed: this rank's configuration with Hydra's part.
        files: of a configuration, that every rank reads for itself.

    Raises:
        ValueError: they were not, or the launcher and the transport do not fit together.
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
    """Take the accelerator of this rank, before MPI looks which one is current.

    Ranks of a machine that follow each other share one if told so. A launcher may show each rank
    its own only, so one may serve any rank.

    Raises:
        ValueError: if there are several, and none for this rank.
    """
    shared = config.comm.ranks_per_device
    if not isinstance(shared, int) or shared < 1:
        raise ValueError(f"comm.ranks_per_device={shared} must be at least 1 rank")
    if config.device == "cpu":
        return
    import torch

    from spatialdl.comm.device_path import take_device

    if not torch.accelerator.is_available():
        return
    number, count = info.local_rank // shared, torch.accelerator.device_count()
    if number >= count > 1:
        raise ValueError(
            f"rank {info.rank} is number {info.local_rank} of its machine, which has {count} "
            f"devices: start at most {count * shared} ranks on it, or take "
            f"comm.ranks_per_device={-(-(info.local_rank + 1) // count)} or more"
        )
    take_device(number % count)
