"""Hydra's launcher for ``launcher=slurm``: a sweep's runs are prepared here and submitted together.

Hydra imports this at every start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict


class SlurmLauncher(Launcher):
    """Has every run of a sweep hand itself in, as a job of Slurm."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what Hydra gives."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Submit runs; returns when they are in the queue.

        Args:
            job_overrides: of each run.
            initial_job_idx: number of the first one in the sweep.

        Raises:
            SystemExit: with what sbatch says.
        """
        from tqdm import tqdm

        from spatialdl.comm.abort import describe_error
        from spatialdl.submitting.runs import gathered, submit

        setup_globals()
        hydra = self._config.hydra
        bar = tqdm(job_overrides, desc="preparing", unit="run", disable=None, delay=2)
        with gathered() as runs:
            found = [
                self._prepare(list(overrides), number)
                for number, overrides in enumerate(bar, start=initial_job_idx)
            ]
        configure_log(hydra.hydra_logging, hydra.verbose)
        try:
            submit(runs, Path(str(hydra.sweep.dir)))
        except ValueError as error:
            sys.exit(f"error: {describe_error(error)}")
        return found

    def _prepare(self, overrides: list[str], number: int) -> JobReturn:
        """Make the run directory with its records, and let the command hand the run in."""
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        return run_job(
            hydra_context=self._context,
            task_function=self._task,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
