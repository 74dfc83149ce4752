"""The training command: ``python -m spatialdl.train key=value ...``.

Started as one process, it is an ordinary Hydra application that counts the ranks its layout needs.
One rank is this process; for several it starts itself again under a launcher. Started by a
launcher, every rank composes the configuration, and all take rank 0's run directory.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import hydra
from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from spatialdl.comm.abort import describe_error, end_job, install_abort_hook
from spatialdl.comm.launch import (
    LaunchInfo,
    check_world_size,
    end_with_launcher,
    launched,
    start_ranks,
)
from spatialdl.comm.world import start_world
from spatialdl.configuring.help import print_help, wants_help
from spatialdl.configuring.overrides import check_overrides
from spatialdl.training import run_log, signals
from spatialdl.training.checks import check_config

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

log = logging.getLogger("spatialdl.train")


def main() -> None:
    """Train, on as many ranks as the configuration asks for."""
    arguments = sys.argv[1:] = [rewritten(argument) for argument in sys.argv[1:]]
    info = launched()
    if wants_help(arguments):
        if info is None or info.rank == 0:
            print_help("train")
        return
    if info is None:
        _run_alone(arguments)
        return
    install_abort_hook()
    end_with_launcher()
    signals.install()
    try:
        _run_rank(info, arguments)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        if stop.code:
            end_job(stop.code if isinstance(stop.code, int) else 1)


def _run_alone(arguments: Sequence[str]) -> None:
    try:
        _check_words(get_args_parser().parse_args(arguments))
        _hydra_main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except (ValueError, OSError) as error:  # or Hydra cannot make the run directory
        print(f"error: {describe_error(error)}", file=sys.stderr)
        sys.exit(1)


def _check_words(flags: Namespace, command: str = "train") -> None:
    """Refuse what no configuration knows.

    Raises:
        ValueError: if there is something.
    """
    elsewhere = flags.config_path is not None or flags.hydra_help or flags.shell_completion
    if not elsewhere:
        overrides, name, folder = flags.overrides, flags.config_name, flags.config_dir
        check_overrides(overrides, command, name, folder, flags.multirun)


@hydra.main(version_base="1.3", config_path="pkg://spatialdl.conf", config_name="train")
def _hydra_main(config: DictConfig) -> None:
    """One job of Hydra, in a process that no launcher has started."""
    job = HydraConfig.get()
    overrides = list(job.overrides.task)
    run_dir = Path(job.runtime.output_dir)
    try:
        if config.parallel.name == "auto":
            config, overrides = _choose(config, overrides, run_dir)
        if config.debug.name == "fakecomm":
            if not _look(config, overrides):
                sys.exit(1)
            return
        placement = check_config(config)
        if placement.world_size > 1:
            log.info("%s: starting %s", run_dir, placement.describe())
            arguments = [*_sources(), *overrides, *_into(run_dir)]
            code = start_ranks(placement.world_size, "spatialdl.train", arguments, stops=True)
            if code:
                sys.exit(code)
        else:
            signals.install()
            run_log.warn_once()
            start_world()
            _train(config, overrides, run_dir)
    except Exception as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        sys.exit(1)


def _look(config: DictConfig, overrides: Sequence[str]) -> bool:
    """Tell what the ranks would do, and whether they would do it."""
    from spatialdl.training.debug.fakecomm import look

    errors = []
    try:
        check_config(config)
        _fit_model_keys(config, overrides)
    except ValueError as error:
        errors.append(describe_error(error))
    return look(config, errors)


def _run_rank(info: LaunchInfo, arguments: Sequence[str]) -> None:
    """What one of several ranks does: agree on configuration and run directory, then train."""
    flags = get_args_parser().parse_args(arguments)
    if flags.hydra_help or flags.info or flags.cfg or flags.shell_completion:
        if info.rank == 0:
            _hydra_main()
        return
    if flags.multirun:
        raise ValueError(
            f"--multirun was started on {info.size} ranks, but starts the ranks of its jobs "
            "itself: leave the launcher out"
        )
    if "hydra.output_subdir=null" not in flags.overrides:  # else the one that starts ranks has
        _check_words(flags)
    composed = _compose(flags)
    config = _without_hydra(composed)
    if config.debug.name == "fakecomm":
        raise ValueError(
            f"debug=fakecomm was started on {info.size} ranks, but tells in one process what "
            "ranks would do: leave the launcher out"
        )
    if config.parallel.name != "auto":
        placement = check_config(config)
        arithmetic = placement.describe().rpartition(" = ")[0]
        needed, replica = placement.world_size, placement.replica_size
        check_world_size(info.size, needed, replica, arithmetic, str(config.parallel.name))
    _choose_gpu(config, info)

    world = start_world(str(config.comm.transport))  # from here on this process is a rank
    if config.parallel.name == "auto":
        config = _choose_together(world, config)
    config, run_dir = _agree(world, composed, config)
    run_log.start_log(run_dir, info.rank)
    _train(config, flags.overrides, run_dir)


def _choose(
    config: DictConfig, overrides: Sequence[str], run_dir: Path
) -> tuple[DictConfig, list[str]]:
    """The best layout in place of ``parallel=auto``, also in the run's records."""
    from spatialdl.planning.auto import choose

    world = config.parallel.world
    if world is None:
        raise ValueError(
            "parallel=auto does not know for how many ranks: add parallel.world=..., or start it "
            "with mpiexec or srun"
        )
    _fit_model_keys(config, overrides)
    config, row = choose(config, world)
    records = run_dir / ".hydra"
    if records.is_dir():
        OmegaConf.save(config, records / "config.yaml")
    others = [one for one in overrides if not re.match(r"\+*parallel(=|\.(world|dev|clus))", one)]
    return config, [*row.layout.overrides(), *others]


def _choose_together(world: Communicator, config: DictConfig) -> DictConfig:
    """The best layout for the ranks that are there, found by rank 0."""
    from spatialdl.planning.auto import choose

    text = ""
    if world.rank == 0:
        text = OmegaConf.to_yaml(choose(config, world.size, may_measure=False)[0])
    agreed: DictConfig = OmegaConf.create(world.bcast(text))
    OmegaConf.set_struct(agreed, True)
    return agreed


def _agree(
    world: Communicator, composed: DictConfig, config: DictConfig
) -> tuple[DictConfig, Path]:
    """Rank 0's configuration and its run directory, which is there when this returns."""
    run_dir = Path(composed.hydra.run.dir).absolute()
    if world.rank == 0:
        _write_records(composed, config, run_dir)
    text, run_dir = world.bcast((OmegaConf.to_yaml(config), run_dir))
    with read_write(composed.hydra.runtime), open_dict(composed.hydra.runtime):
        composed.hydra.runtime.output_dir = str(run_dir)
    HydraConfig.instance().set_config(composed)
    agreed = OmegaConf.create(text)
    OmegaConf.set_struct(agreed, True)
    return agreed, run_dir


def _train(config: DictConfig, overrides: Iterable[str], run_dir: Path) -> None:
    """Train in this process, which is the only rank or one of several."""
    from spatialdl.training import trainer

    _fit_model_keys(config, overrides)
    if config.trainer.max_steps is None and config.trainer.max_epochs is None:
        config.trainer.max_epochs = 1
    trainer.run(config, run_dir)


def rewritten(argument: str) -> str:
    """Let a network of the user's have keys that the group's file does not know; short forms."""
    if re.match(r"model\.[\w.]+=", argument):
        return f"++{argument}"
    return re.sub(r"^data\.stage=(?!\{)", "data.stage.to=", argument)


def _fit_model_keys(config: DictConfig, overrides: Iterable[str]) -> None:
    """Where the user names a network, leave out what the group's file says and it does not take.

    Raises:
        ValueError: if there is no such network.
    """
    given = {key[1] for o in overrides if (key := re.match(r"\+*model\.(\w+)", o))}
    if "_target_" not in given:
        return
    target = config.model["_target_"]
    try:
        taken = inspect.signature(resolve_name(target)).parameters
    except Exception as error:
        raise ValueError(f"model._target_={target} cannot be imported: {error}") from error
    with open_dict(config.model):
        for key in list(config.model):
            if key not in taken and key not in given:
                del config.model[key]


def _choose_gpu(config: DictConfig, info: LaunchInfo) -> None:
    """The GPU of this rank, before MPI looks which one is current.

    Ranks of a machine that follow each other share one if told so. A launcher may show each rank
    its own GPU only, so there may be fewer than ranks.
    """
    shared = config.comm.ranks_per_device
    if not isinstance(shared, int) or shared < 1:
        raise ValueError(f"comm.ranks_per_device={shared} must be at least 1 rank")
    if config.device == "cpu":
        return
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(info.local_rank // shared % torch.cuda.device_count())


def _sources() -> list[str]:
    """The flags that say where this job's configuration came from."""
    job = HydraConfig.get()
    flags = ["--config-name", str(job.job.config_name)]
    for source in job.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", str(source.path)]
    return [*flags, *(o for o in job.overrides.hydra if o.startswith("hydra.searchpath="))]


def _into(run_dir: Path) -> list[str]:
    """Overrides that send ranks to a directory whose records are already written."""
    quoted = str(run_dir).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.run.dir='{quoted}'", "hydra.output_subdir=null"]


def _compose(flags: Namespace) -> DictConfig:
    """The configuration with Hydra's own part, as ``hydra.main`` would make it."""
    if flags.config_path is not None:
        raise ValueError("--config-path is not known here: name the folder with --config-dir")
    overrides = list(flags.overrides)
    if flags.config_dir is not None:
        overrides.append(f"hydra.searchpath=['file://{os.path.abspath(flags.config_dir)}']")
    with initialize_config_module("spatialdl.conf", job_name="train", version_base="1.3"):
        return compose(flags.config_name or "train", overrides, return_hydra_config=True)


def _without_hydra(composed: DictConfig) -> DictConfig:
    config = composed.copy()
    with open_dict(config):
        del config["hydra"]
    return config


def _write_records(composed: DictConfig, config: DictConfig, run_dir: Path) -> None:
    """What Hydra writes into a run directory, unless the process before this one did."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if composed.hydra.output_subdir is None:
        return
    records = run_dir / str(composed.hydra.output_subdir)
    records.mkdir(exist_ok=True)
    OmegaConf.save(config, records / "config.yaml")
    OmegaConf.save(OmegaConf.create({"hydra": composed.hydra}), records / "hydra.yaml")
    OmegaConf.save(composed.hydra.overrides.task, records / "overrides.yaml")


if __name__ == "__main__":
    main()
