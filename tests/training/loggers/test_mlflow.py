from __future__ import annotations

import math

import numpy as np
import pytest
from omegaconf import OmegaConf

pytest.importorskip("mlflow")

from spatialdl.training.loggers.mlflow import MLflow, flat

SETTINGS = {"tracking_uri": None, "experiment": "tests", "name": "mine"}


def test_a_run_is_in_its_directory_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for steps, rate in (((1, 2), 0.1), ((3,), 0.2)):
        logger = MLflow(OmegaConf.create(SETTINGS), tmp_path)
        logger.log_config({"optimizer": {"lr": rate}, "weights": None})
        for step in steps:
            logger.log_step(step, {"loss": 1 / step, "bad": math.nan})
        logger.log_validation(steps[-1], {"accuracy": 0.5})
        logger.log_image(steps[-1], "sample 0", np.full((4, 5, 3), 200, np.uint8))
        logger.finish()
    client, run = logger._client, logger._client.get_run(logger._id)
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params == {"optimizer.lr": "0.1", "weights": "None"}
    history = client.get_metric_history(logger._id, "train/loss")
    assert [(one.step, one.value) for one in history] == [
        *((1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)))
    ]
    assert "train/bad" not in run.data.metrics
    files = [one.path for one in client.list_artifacts(logger._id, "sample 0")]
    assert files == ["sample 0/00000002.png", "sample 0/00000003.png"]


def test_nested_settings_have_names_with_dots():
    assert dict(flat({"a": {"b": 1, "c": {}}, "d": [1]})) == {"a.b": 1, "a.c": {}, "d": [1]}
