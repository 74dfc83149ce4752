"""The evaluation command: ``python -m spatialdl.evaluate ckpt_path=... shards=... split=test``.

Predicts like ``spatialdl.predict``, on the number of ranks that ``parallel`` needs, and compares
predictions with labels; or reads earlier predictions, ``predictions=DIR``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from spatialdl.cli.prediction import Command
from spatialdl.cli.rank_state import evaluation_files
from spatialdl.inference.evaluating.checks import check_evaluation

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator


def main() -> None:
    """Evaluate on the number of ranks that the configuration needs."""
    _COMMAND.main()


@hydra.main(version_base="1.3", config_path="pkg://spatialdl.conf", config_name="evaluate")
def _hydra_main(config: DictConfig) -> None:
    _COMMAND.start(config)


def _run(config: DictConfig, run_dir: Path, world: Communicator) -> bool:
    from spatialdl.inference.evaluating.evaluation import run

    return run(config, run_dir, world)


_COMMAND = Command(
    name="evaluate",
    application=_hydra_main,
    check=check_evaluation,
    files=evaluation_files,
    run=_run,
    failed="error: some predictions failed, and the metrics exclude them; see status and reason "
    "in the tables of {run_dir}",
)

if __name__ == "__main__":
    main()
