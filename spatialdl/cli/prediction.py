"""Common parts of the prediction and evaluation commands."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from spatialdl.cli.rank_state import RankState
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
from spatialdl.comm.capacity import check_capacity
from spatialdl.comm.launch import LaunchInfo, launched, start_ranks
from spatialdl.comm.liveness import print_last
from spatialdl.comm.world import start_world
from spatialdl.common.configuring.help import print_help, wants_help
from spatialdl.common.configuring.overrides import flags_of
from spatialdl.inference.predicting.checks import names_own_network
from spatialdl.inference.predicting.slide_paths import slide_paths, volume_paths
from spatialdl.training.console import run_log

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator
    from spatialdl.layout.placement import Placement


@dataclass(frozen=True)
class Command:
    """A command that predicts, and may process the predictions.

    Attributes:
        name: of the command and of its configuration; its module is ``spatialdl.NAME``.
        application: the function under ``hydra.main``, which calls `start`.
        check: computes the ranks that a configuration needs; raises ValueError if it is invalid.
        files: files that every rank reads independently.
        run: does the work, on every rank; returns whether all predictions succeeded.
        failed: error message if some predictions failed, with ``{run_dir}``.
    """

    name: str
    application: Callable[[], object]
    check: Callable[[DictConfig], Placement]
    files: Callable[[DictConfig], RankState]
    run: Callable[[DictConfig, Path, Communicator], bool]
    failed: str

    def main(self) -> None:
        """Handle the command line of this process, which may be one of several ranks."""
        info = launched()
        if wants_help(sys.argv[1:]):
            if info is None or info.rank == 0:
                print_help(self.name, sys.argv[1:])
        elif info is None:
            run_single_process(self._run_alone)
        else:
            run_as_rank(lambda: self._run_rank(info))

    def start(self, config: DictConfig) -> None:
        """Run one Hydra job, in a process without a launcher."""
        with hydra_job() as run_dir:
            self._start(config, run_dir)

    def _run_alone(self) -> None:
        check_command_line(flags_of(sys.argv[1:], self.name), self.name)
        self.application()

    def _start(self, config: DictConfig, run_dir: Path) -> None:
        job = HydraConfig.get()
        placement = self.check(config)
        check_capacity(placement.world_size, config.comm.oversubscribe)
        if config.slides is not None:  # report errors before ranks start, which takes minutes
            slide_paths(config.slides)
        if config.volumes is not None:
            volume_paths(config.volumes)
        if placement.world_size == 1:
            run_log.warn_once()
            self._work(start_world(), composed_job(), config)
            return
        if names_own_network(str(config.ckpt_path)):
            from spatialdl.inference.predicting.network import check_own_network

            check_own_network(config)
        log = logging.getLogger(f"spatialdl.{self.name}")
        log.info("%s: starting %s", run_dir, placement.describe())
        arguments = [*config_source_flags(), *job.overrides.task, *run_dir_overrides(run_dir)]
        log_file = run_dir / f"{self.name}.log"
        code = start_ranks(placement.world_size, f"spatialdl.{self.name}", arguments, log=log_file)
        if code:
            sys.exit(code)

    def _run_rank(self, info: LaunchInfo) -> None:
        """Agree on configuration and run directory, then work, on one of several ranks."""
        flags_and_config = composed_by_rank(info, sys.argv[1:], self.name, self.application)
        if flags_and_config is None:
            return
        _, composed = flags_and_config
        config = without_hydra(composed)
        self.check(config).check_world(info.size, f"parallel={config.parallel.name}")
        world = join_ranks(info, composed, self.files)
        self._work(world, composed, config)

    def _work(self, world: Communicator, composed: DictConfig, config: DictConfig) -> None:
        """Work in this process, the only rank or one of several."""
        # damage is reported by this package, which listens to what tifffile logs
        logging.getLogger("tifffile").propagate = False
        with run_directory(world, composed, config, self.name) as (agreed, run_dir):
            succeeded = self.run(agreed, run_dir, world)
            run_log.log_warnings(world)
        if not succeeded:
            if world.rank == 0:  # after the launcher's messages about failed ranks
                print_last(self.failed.format(run_dir=run_dir))
            sys.stdout.flush()
            world.barrier()  # no rank is killed before it has printed everything
            sys.exit(1)
