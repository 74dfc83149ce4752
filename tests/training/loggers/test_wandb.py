from __future__ import annotations

import numpy as np
import pytest
from omegaconf import OmegaConf

pytest.importorskip("wandb")

from spatialdl.training.loggers.wandb import WandB

SETTINGS = {"project": "spatialdl", "entity": None, "name": None, "mode": "offline"}


def test_an_offline_run_is_in_the_run_directory_and_goes_on(tmp_path):
    identities = []
    for _ in range(2):
        logger = WandB(OmegaConf.create(SETTINGS), tmp_path)
        logger.log_config({"optimizer": {"lr": 0.1}})
        logger.log_step(1, {"loss": 0.5})
        logger.log_validation(1, {"accuracy": 0.5})
        logger.log_image(1, "sample 0", np.full((4, 5, 3), 200, np.uint8))
        assert logger._run.summary["train/loss"] == 0.5
        assert logger._run.summary["validation/accuracy"] == 0.5
        assert logger._run.config["optimizer"] == {"lr": 0.1}
        logger.finish()
        identities.append((tmp_path / "wandb.id").read_text())
    assert identities[0] == identities[1]
    written = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 2
    assert any(b"train/loss" in file.read_bytes() for file in written)
    assert list((tmp_path / "wandb").glob("offline-run-*/files/media/images/sample 0*.png"))
