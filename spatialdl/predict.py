"""The prediction command: ``python -m spatialdl.predict ckpt_path=... slides=...``.

Starts like ``spatialdl.train``, on the number of ranks that ``parallel`` needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from spatialdl.cli.prediction import Command
from spatialdl.cli.rank_state import prediction_files
from spatialdl.inference.predicting.checks import check_config

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator


def main() -> None:
    """Predict on the number of ranks that the configuration needs."""
    _COMMAND.main()


@hydra.main(version_base="1.3", config_path="pkg://spatialdl.conf", config_name="predict")
def _hydra_main(config: DictConfig) -> None:
    _COMMAND.start(config)


def _run(config: DictConfig, run_dir: Path, world: Communicator) -> bool:
    from spatialdl.inference.predicting.batch import run

    return run(config, run_dir, world)


_COMMAND = Command(
    name="predict",
    application=_hydra_main,
    check=check_config,
    files=prediction_files,
    run=_run,
    failed="error: some predictions failed, see status and reason in the tables of {run_dir}; "
    "run the same command again to retry them",
)

if __name__ == "__main__":
    main()
