from __future__ import annotations

import csv
import logging

import pytest
from hydra import compose, initialize_config_module

from spatialdl.training.reporter import Reporter

STEP = {"epoch": 0, "learning_rate": 0.1, "images_per_second": 5.0, "data_wait": 0.25}
SUMMARY = {"world_size": 1, "peak_memory_mb": [100.0], "time_split": {}}


def reporter(run_dir) -> Reporter:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", ["logger=tensorboard"])
    return Reporter(
        config,
        run_dir,
        steps=3,
        table="layout: 1 replica",
        names=["a", "b"],
        columns=["halo"],
        resumed=None,
    )


def test_the_table_validations_and_one_warning_are_said(tmp_path, caplog):
    with caplog.at_level(logging.INFO), reporter(tmp_path) as ours:
        for step, loss in enumerate([1.0, float("nan"), float("nan")], 1):
            ours.step(step=step, loss=loss, memory_mb=9.0, halo=0.5, **STEP)
        ours.validated(3, {"loss": 0.5, "samples": 4, "accuracy": 0.25})
        ours.finish(SUMMARY, [])
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "layout: 1 replica"
    assert sum("the loss is nan" in text for text in said) == 1
    assert [text for text in said if text.startswith("validation after step 3, 4 samples")]
    assert said[-1] == f"report:        {tmp_path / 'report.html'}"
    with (tmp_path / "metrics.csv").open(newline="") as lines:
        assert [row["halo"] for row in csv.DictReader(lines)] == ["0.5"] * 3


@pytest.mark.parametrize("stops", [False, True])
def test_a_report_that_cannot_be_written_ends_no_run(stops, tmp_path, caplog):
    with reporter(tmp_path) as ours:
        (tmp_path / "report.html").mkdir()
        (tmp_path / "report.html" / "a_file").touch()
        if stops:
            ours.stopped(SUMMARY, "Stopped.")
        else:
            ours.finish(SUMMARY, [])
    assert (tmp_path / "summary.json").exists() != stops
    (warning,) = (one.getMessage() for one in caplog.records if one.levelno == logging.WARNING)
    assert warning.startswith("the report is not written: ")
