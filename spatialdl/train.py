"""The training command: ``python -m spatialdl.train key=value ...``.

Started as one process, it is an ordinary Hydra application that computes the number of ranks from
the layout. One rank runs in this process; several are launched; see `starting`.
"""

from __future__ import annotations

if __name__ == "__main__":
    from spatialdl.comm import early_signals

    early_signals.keep()  # before other imports, which take seconds

import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spatialdl.cli.rank_state import training_files
from spatialdl.cli.start import (
    check_command_line,
    composed_by_rank,
    composed_job,
    config_source_flags,
    hydra_job,
    join_ranks,
    run_as_rank,
    run_dir_overrides,
    run_directory,
    run_single_process,
    without_hydra,
)
from spatialdl.comm.abort import describe_error
from spatialdl.comm.capacity import check_capacity
from spatialdl.comm.ending import forget_run
from spatialdl.comm.launch import LaunchInfo, launched, start_ranks
from spatialdl.comm.world import start_world
from spatialdl.common.configuring.help import print_help, wants_help
from spatialdl.common.configuring.overrides import flags_of
from spatialdl.common.configuring.own_keys import fit_model_keys, is_own_network, rewritten
from spatialdl.training import signals
from spatialdl.training.checks import check_config
from spatialdl.training.console import run_log

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

log = logging.getLogger("spatialdl.train")


def main() -> None:
    """Train on the number of ranks that the configuration needs."""
    arguments = sys.argv[1:] = [rewritten(argument) for argument in sys.argv[1:]]
    info = launched()
    if wants_help(arguments):
        if info is None or info.rank == 0:
            print_help("train", arguments)
        return
    if info is None:
        run_single_process(lambda: _run_alone(arguments))
        return
    signals.install()
    run_as_rank(lambda: _run_rank(info, arguments))


def _run_alone(arguments: Sequence[str]) -> None:
    check_command_line(flags_of(arguments), "train")
    _hydra_main()


@hydra.main(version_base="1.3", config_path="pkg://spatialdl.conf", config_name="train")
def _hydra_main(config: DictConfig) -> None:
    """Run one Hydra job, in a process without a launcher."""
    job = HydraConfig.get()
    overrides = list(job.overrides.task)
    with hydra_job() as run_dir:
        if config.launcher.name == "slurm":
            _submit(config, overrides, run_dir)
            return
        if config.parallel.name == "auto":
            from spatialdl.planning.setup import choose_alone

            config, overrides = choose_alone(config, overrides)
        if config.debug.name == "fakecomm":
            forget_run()
            if not _print_preflight(config, overrides):
                sys.exit(1)
            return
        placement = check_config(config)
        if placement.world_size > 1:
            check_capacity(placement.world_size, config.comm.oversubscribe)
            check_data_and_network(config, overrides)
            log.info("%s: starting %s", run_dir, placement.describe())
            arguments = [*config_source_flags(), *overrides, *run_dir_overrides(run_dir)]
            code = start_ranks(
                *(placement.world_size, "spatialdl.train", arguments),
                stops=True,
                log=run_dir / "train.log",
            )
            if code:
                sys.exit(code)
        else:
            fit_model_keys(config.copy(), overrides)  # refused before there is a run directory
            signals.install()
            run_log.warn_once()
            _train(start_world(), composed_job(), config, overrides)


def check_data_and_network(config: DictConfig, overrides: Sequence[str]) -> None:
    """Open the data sets, and build a user's network, once before ranks start.

    Their errors are printed once. Synthetic data sets need no look: the configuration describes
    them.

    Raises:
        ValueError: if data, network, initial weights and layout do not fit together.
    """
    from spatialdl.training.checks import check_stored_size

    check_stored_size(config.data, config.parallel)
    is_own = is_own_network(config.model["_target_"])
    if config.data.name == "synthetic" and not is_own:
        return
    from spatialdl.training.settings import open_and_check

    config = config.copy()
    if is_own:
        fit_model_keys(config, overrides)
    sources = open_and_check(config)
    if is_own:
        from spatialdl.comm.single_process import SingleProcess
        from spatialdl.training.network.building import make_network

        make_network(config, sources, SingleProcess())


def _print_preflight(config: DictConfig, overrides: Sequence[str]) -> bool:
    """Print the preflight report of the ranks; return whether they would run."""
    from spatialdl.planning.fakecomm import look

    errors = []
    try:
        check_config(config)
        fit_model_keys(config, overrides)
    except ValueError as error:
        errors.append(describe_error(error))
    return look(config, errors)


def _submit(config: DictConfig, overrides: Sequence[str], run_dir: Path) -> None:
    """Submit the run as a Slurm job."""
    from spatialdl.cli.slurm_runs import submit_run

    fit_model_keys(config, overrides)
    submit_run(config, overrides, run_dir)


def _run_rank(info: LaunchInfo, arguments: Sequence[str]) -> None:
    """Agree on configuration and run directory, then train, on one of several ranks."""
    flags_and_config = composed_by_rank(info, arguments, "train", _hydra_main)
    if flags_and_config is None:
        return
    flags, composed = flags_and_config
    config = without_hydra(composed)
    if config.debug.name == "fakecomm":
        raise ValueError(
            f"debug=fakecomm was started on {info.size} ranks, but simulates them in one process: "
            "start it without a launcher"
        )
    if config.launcher.name != "local":
        raise ValueError(
            f"launcher={config.launcher.name} was started by {info.launcher} on {info.size} ranks, "
            "but submits jobs that launch their own ranks: omit one of the two"
        )
    if config.parallel.name != "auto":
        check_config(config).check_world(info.size, f"parallel={config.parallel.name}")
    world = join_ranks(info, composed, training_files)
    if config.parallel.name == "auto":
        config = _choose_together(world, config)
    _train(world, composed, config, flags.overrides)
    signals.ignore()


def _choose_together(world: Communicator, config: DictConfig) -> DictConfig:
    """The best layout for the launched ranks, computed by rank 0."""
    from spatialdl.planning.setup import choose

    text = ""
    if world.rank == 0:
        text = OmegaConf.to_yaml(choose(config, world.size, may_measure=False)[0])
    agreed: DictConfig = OmegaConf.create(world.bcast(text))
    OmegaConf.set_struct(agreed, True)
    return agreed


def _train(
    world: Communicator, composed: DictConfig, config: DictConfig, overrides: Iterable[str]
) -> None:
    """Train in this process, the only rank or one of several."""
    from spatialdl.training import trainer

    with run_directory(world, composed, config, "train") as (agreed, run_dir):
        fit_model_keys(agreed, overrides)
        if agreed.trainer.max_steps is None and agreed.trainer.max_epochs is None:
            agreed.trainer.max_epochs = 1
        trainer.run(agreed, run_dir)


if __name__ == "__main__":
    main()
