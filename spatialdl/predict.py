"""The predicting command: ``python -m spatialdl.predict ckpt_path=... slides=...``.

It starts as ``spatialdl.train`` does, on as many ranks as ``parallel`` needs.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from spatialdl.comm.abort import describe_error
from spatialdl.comm.launch import LaunchInfo, launched, start_ranks
from spatialdl.comm.roll_call import say_last
from spatialdl.comm.world import start_world
from spatialdl.configuring.help import print_help, wants_help
from spatialdl.configuring.overrides import flags_of
from spatialdl.predicting.checks import check_config, names_own_network
from spatialdl.predicting.given import given_slides, given_volumes
from spatialdl.sameness.subjects import prediction_files
from spatialdl.starting import (
    alone,
    as_rank,
    check_words,
    composed_by_rank,
    composed_job,
    into,
    meet,
    run_directory,
    sources,
    without_hydra,
)
from spatialdl.training.console import run_log

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

log = logging.getLogger("spatialdl.predict")


def main() -> None:
    """Predict, on as many ranks as the configuration asks for."""
    info = launched()
    if wants_help(sys.argv[1:]):
        if info is None or info.rank == 0:
            print_help("predict")
        return
    if info is None:
        alone(_run_alone)
    else:
        as_rank(lambda: _run_rank(info))


def _run_alone() -> None:
    check_words(flags_of(sys.argv[1:], "predict"), "predict")
    _hydra_main()


@hydra.main(version_base="1.3", config_path="pkg://spatialdl.conf", config_name="predict")
def _hydra_main(config: DictConfig) -> None:
    """One job of Hydra, in a process that no launcher has started."""
    job = HydraConfig.get()
    run_dir = Path(job.runtime.output_dir)
    try:
        placement = check_config(config)
        if config.slides is not None:  # mistakes are told before minutes go into starting ranks
            given_slides(config.slides)
        if config.volumes is not None:
            given_volumes(config.volumes)
        if placement.world_size > 1:
            if names_own_network(str(config.ckpt_path)):
                from spatialdl.predicting.network import check_own_network

                check_own_network(config)
            log.info("%s: starting %s", run_dir, placement.describe())
            arguments = [*sources(), *job.overrides.task, *into(run_dir)]
            code = start_ranks(placement.world_size, "spatialdl.predict", arguments)
            if code:
                sys.exit(code)
        else:
            run_log.warn_once()
            _predict(start_world(), composed_job(), config)
    except Exception as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        sys.exit(1)


def _run_rank(info: LaunchInfo) -> None:
    """What one of several ranks does: agree on configuration and run directory, then predict."""
    found = composed_by_rank(info, sys.argv[1:], "predict", _hydra_main)
    if found is None:
        return
    _, composed = found
    config = without_hydra(composed)
    check_config(config).check_world(info.size, f"parallel={config.parallel.name}")
    world = meet(info, composed, prediction_files)  # from here on this process is a rank
    _predict(world, composed, config)


def _predict(world: Communicator, composed: DictConfig, config: DictConfig) -> None:
    """Predict in this process, which is the only rank or one of several."""
    from spatialdl.predicting.batch import run

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # damaged slides are told by us
    with run_directory(world, composed, config, "predict") as (agreed, run_dir):
        succeeded = run(agreed, run_dir, world)
        run_log.tell_warnings(world)
    if not succeeded:
        if world.rank == 0:  # below what launchers say of ranks that end with an error
            say_last(
                "error: not all was predicted, see status and reason in the tables of "
                f"{run_dir}; the same command tries again what failed"
            )
        sys.stdout.flush()
        world.barrier()  # nobody is ended before it has said all
        sys.exit(1)


if __name__ == "__main__":
    main()
