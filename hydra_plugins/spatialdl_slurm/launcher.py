"""Hydra launcher of ``launcher=slurm``: prepares the runs of a sweep and submits them together.

Hydra imports this module at every start, so it must import quickly.
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
    """Launcher that submits the runs of a sweep as Slurm jobs."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store the arguments of Hydra."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Submit the runs; returns when they are queued.

        Args:
            job_overrides: overrides of each run.
            initial_job_idx: number of the first run in the sweep.

        Raises:
            SystemExit: submission failed; with the error of sbatch.
        """
        from tqdm import tqdm

        from spatialdl.cli.slurm_runs import gathered, submit
        from spatialdl.comm.abort import describe_error

        setup_globals()
        hydra = self._config.hydra
        bar = tqdm(job_overrides, desc="preparing", unit="run", disable=None, delay=2)
        with gathered() as runs:
            prepared = [
                self._prepare(list(overrides), number)
                for number, overrides in enumerate(bar, start=initial_job_idx)
            ]
        configure_log(hydra.hydra_logging, hydra.verbose)
        try:
            submit(runs, Path(str(hydra.sweep.dir)))
        except ValueError as error:
            sys.exit(f"error: {describe_error(error)}")
        return prepared

    def _prepare(self, overrides: list[str], number: int) -> JobReturn:
        """Create the run directory and its records; the command queues the run for submission."""
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
