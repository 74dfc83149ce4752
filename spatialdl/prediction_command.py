"""What the predicting and the evaluating command share: ranks that predict, and how they end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from spatialdl.comm.abort import describe_error
from spatialdl.comm.launch import LaunchInfo, launched, start_ranks
from spatialdl.comm.liveness import say_last
from spatialdl.comm.world import start_world
from spatialdl.configuring.help import print_help, wants_help
from spatialdl.configuring.overrides import flags_of
from spatialdl.consistency.rank_state import RankState
from spatialdl.predicting.checks import names_own_network
from spatialdl.predicting.slide_paths import slide_paths, volume_paths
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
    from spatialdl.parallel.placement import Placement


@dataclass(frozen=True)
class Command:
    """A command that predicts, and may do more with the predictions.

    Attributes:
        name: of the command and of its configuration; its module is ``spatialdl.NAME``.
        application: the function under ``hydra.main``, which calls `start`.
        check: which ranks a configuration needs; raises ValueError if it cannot work.
        files: that every rank reads for itself.
        run: does the work, on every rank; whether all was predicted.
        failed: the error message if not all was, with ``{run_dir}`` in it.
    """

    name: str
    application: Callable[[], object]
    check: Callable[[DictConfig], Placement]
    files: Callable[[DictConfig], RankState]
    run: Callable[[DictConfig, Path, Communicator], bool]
    failed: str

    def main(self) -> None:
        """Answer the command line of this process, which may be one of several ranks."""
        info = launched()
        if wants_help(sys.argv[1:]):
            if info is None or info.rank == 0:
                print_help(self.name)
        elif info is None:
            alone(self._run_alone)
        else:
            as_rank(lambda: self._run_rank(info))

    def start(self, config: DictConfig) -> None:
        """Run one job of Hydra, in a process that no launcher has started."""
        try:
            self._start(config)
        except Exception as error:
            print(f"error: {describe_error(error)}", file=sys.stderr)
            sys.exit(1)

    def _run_alone(self) -> None:
        check_words(flags_of(sys.argv[1:], self.name), self.name)
        self.application()

    def _start(self, config: DictConfig) -> None:
        job = HydraConfig.get()
        run_dir = Path(job.runtime.output_dir)
        placement = self.check(config)
        if config.slides is not None:  # mistakes are reported before minutes go into starting ranks
            slide_paths(config.slides)
        if config.volumes is not None:
            volume_paths(config.volumes)
        if placement.world_size == 1:
            run_log.warn_once()
            self._work(start_world(), composed_job(), config)
            return
        if names_own_network(str(config.ckpt_path)):
            from spatialdl.predicting.network import check_own_network

            check_own_network(config)
        log = logging.getLogger(f"spatialdl.{self.name}")
        log.info("%s: starting %s", run_dir, placement.describe())
        arguments = [*sources(), *job.overrides.task, *into(run_dir)]
        code = start_ranks(placement.world_size, f"spatialdl.{self.name}", arguments)
        if code:
            sys.exit(code)

    def _run_rank(self, info: LaunchInfo) -> None:
        """Agree on configuration and run directory, then work, on one of several ranks."""
        found = composed_by_rank(info, sys.argv[1:], self.name, self.application)
        if found is None:
            return
        _, composed = found
        config = without_hydra(composed)
        self.check(config).check_world(info.size, f"parallel={config.parallel.name}")
        world = meet(info, composed, self.files)  # from here on this process is a rank
        self._work(world, composed, config)

    def _work(self, world: Communicator, composed: DictConfig, config: DictConfig) -> None:
        """Work in this process, which is the only rank or one of several."""
        # damaged slides are reported by us
        logging.getLogger("tifffile").setLevel(logging.CRITICAL)
        with run_directory(world, composed, config, self.name) as (agreed, run_dir):
            succeeded = self.run(agreed, run_dir, world)
            run_log.log_warnings(world)
        if not succeeded:
            if world.rank == 0:  # below what launchers say of ranks that end with an error
                say_last(self.failed.format(run_dir=run_dir))
            sys.stdout.flush()
            world.barrier()  # no rank is ended before it has printed all
            sys.exit(1)
