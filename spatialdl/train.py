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
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write

from spatialdl.comm.abort import describe_error, end_job, install_abort_hook
from spatialdl.comm.launch import (
    LaunchInfo,
    check_world_size,
    end_with_launcher,
    launched,
    start_ranks,
)
from spatialdl.comm.world import start_world
from spatialdl.mesh import Placement
from spatialdl.training import signals

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

PRECISIONS = ("float32", "float64", "bf16-mixed", "fp16-mixed")
SWITCHES = ("tf32", "channels_last", "deterministic")
OF_WHOLE_WEIGHTS = ("LARS", "LAMB")
DEVICES = ("auto", "cpu", "cuda")
TASKS = ("classification", "multilabel", "regression", "segmentation")
BALANCES = ("time", "measured", "memory")
TRANSPORTS = ("auto", "mpi", "torch")
BACKENDS = (None, "mpi4py", "gloo", "nccl")

log = logging.getLogger("spatialdl.train")


def main() -> None:
    """Train, on as many ranks as the configuration asks for."""
    arguments = sys.argv[1:] = [rewritten(argument) for argument in sys.argv[1:]]
    info = launched()
    if info is None:
        _run_alone()
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


def _run_alone() -> None:
    try:
        _hydra_main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except OSError as error:  # Hydra cannot make the run directory
        sys.exit(f"error: {describe_error(error)}")


@hydra.main(version_base="1.3", config_path="pkg://spatialdl.conf", config_name="train")
def _hydra_main(config: DictConfig) -> None:
    """One job of Hydra, in a process that no launcher has started."""
    job = HydraConfig.get()
    overrides = list(job.overrides.task)
    run_dir = Path(job.runtime.output_dir)
    try:
        if config.parallel.name == "auto":
            config, overrides = _choose(config, overrides, run_dir)
        placement = _plan(config)
        if placement.world_size > 1:
            log.info("%s: starting %s", run_dir, placement.describe())
            arguments = [*_sources(), *overrides, *_into(run_dir)]
            code = start_ranks(placement.world_size, "spatialdl.train", arguments, stops=True)
            if code:
                sys.exit(code)
        else:
            signals.install()
            start_world()
            _train(config, overrides, run_dir)
    except Exception as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        sys.exit(1)


def _run_rank(info: LaunchInfo, arguments: Sequence[str]) -> None:
    """What one of several ranks does: agree on configuration and run directory, then train."""
    flags = get_args_parser().parse_args(arguments)
    if flags.help or flags.hydra_help or flags.info or flags.cfg or flags.shell_completion:
        if info.rank == 0:
            _hydra_main()
        return
    if flags.multirun:
        raise ValueError(
            f"--multirun was started on {info.size} ranks, but starts the ranks of its jobs "
            "itself: leave the launcher out"
        )
    composed = _compose(flags)
    config = _without_hydra(composed)
    if config.parallel.name != "auto":
        placement = _plan(config)
        arithmetic = placement.describe().rpartition(" = ")[0]
        needed, replica = placement.world_size, placement.replica_size
        check_world_size(info.size, needed, replica, arithmetic, str(config.parallel.name))
    _choose_gpu(config, info)

    world = start_world(str(config.comm.transport))  # from here on this process is a rank
    if config.parallel.name == "auto":
        config = _choose_together(world, config)
    config, run_dir = _agree(world, composed, config)
    _start_log(run_dir, info.rank)
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


def _plan(config: DictConfig) -> Placement:
    """Which ranks this configuration needs, after a look at what would fail on all of them."""
    from spatialdl.training.layouts import (
        check_batch,
        check_image,
        check_task,
        placement_of,
        schedule_of,
    )

    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError(f"{', '.join(missing)} has no value: add {missing[0]}=...")
    choices = {
        "trainer.precision": PRECISIONS,
        "device": DEVICES,
        "task.name": TASKS,
        "comm.transport": TRANSPORTS,
        "comm.backend": BACKENDS,
        "parallel.balance": BALANCES,
    }
    for key, known in choices.items():
        value = OmegaConf.select(config, key)
        if value not in known:
            names = ", ".join("null" if one is None else one for one in known)
            raise ValueError(f"{key}={value} is not supported: take one of {names}")
    placement = placement_of(config.parallel)
    accumulate = _check_trainer(config)
    schedule = schedule_of(config.parallel, placement, accumulate)
    local, batch = max(placement.batch, default=1), config.data.batch_size
    if isinstance(batch, int):
        batch *= accumulate
    check_batch(batch, schedule.microbatches, placement.data, local)
    check_task(config.task.name, placement)
    if isinstance(config.data.image_size, ListConfig) and len(config.data.image_size) == 2:
        check_image(tuple(config.data.image_size), placement)
    if config.data.name == "shards" and not Path(config.data.path).is_dir():
        raise ValueError(f"data.path={config.data.path} is no folder: write one by spatialdl-tile")
    targets = config.data.get("targets")
    if targets is not None and not Path(targets).expanduser().is_file():
        raise ValueError(f"data.targets={targets} is no file")
    return placement


def _check_trainer(config: DictConfig) -> int:
    """Batches that a step accumulates, after a look at the trainer's other settings."""
    from spatialdl.training.checkpoints.settings import check_settings

    settings = config.trainer
    for key in SWITCHES:
        if not isinstance(settings[key], bool):
            raise ValueError(f"trainer.{key}={settings[key]} must be true or false")
    check_settings(settings)
    clip, decay = settings.clip_norm, settings.ema
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ValueError(f"trainer.clip_norm={clip} must be above 0, or null")
    if decay is not None and not (isinstance(decay, int | float) and 0 <= decay < 1):
        raise ValueError(f"trainer.ema={decay} must be at least 0 and below 1, or null")
    accumulate = settings.accumulate
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"trainer.accumulate={accumulate} must be at least 1 batch")
    optimizer = str(config.optimizer["_target_"])
    if config.parallel.shard_state and optimizer.endswith(OF_WHOLE_WEIGHTS):
        raise ValueError(
            f"optimizer._target_={optimizer} needs the norms of whole weights, but "
            "parallel.shard_state=true leaves a part of each on a rank: take sgd or adamw"
        )
    return int(accumulate)


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


def _start_log(run_dir: Path, rank: int) -> None:
    """Rank 0 logs as Hydra does, to the terminal and a file; the others only what is wrong."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if rank == 0:
        handlers.append(logging.FileHandler(run_dir / "train.log"))
    who = "" if rank == 0 else f"[rank {rank}]"
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"[%(asctime)s]{who}[%(name)s][%(levelname)s] - %(message)s",
        handlers=handlers,
        force=True,
    )


if __name__ == "__main__":
    main()
