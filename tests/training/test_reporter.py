from __future__ import annotations

import csv
import logging

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spatialdl.training.pictures.gallery import Example
from spatialdl.training.reporter import Reporter

STEP = {"epoch": 0, "learning_rate": 0.1, "images_per_second": 5.0, "data_wait": 0.25}
SUMMARY = {"world_size": 1, "peak_memory_mb": [100.0], "time_split": {}}


def reporter(run_dir, *overrides: str) -> Reporter:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", ["logger=tensorboard", *overrides])
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
    assert warning.startswith("cannot write the report: ")


def test_examples_and_the_timeline_are_in_tensorboard(tmp_path):
    Image.new("RGB", (30, 20), "red").save(tmp_path / "timeline.png")
    pixels = np.full((300, 400, 3), 7, np.uint8)
    shown = Example(
        3, "sample 3", "true a, predicted b", 0.5, {"image": pixels, "heat map of b": pixels}
    )
    with reporter(tmp_path, "trainer.trace=true") as ours:
        ours.step(step=3, loss=1.0, memory_mb=9.0, halo=0.5, **STEP)
        ours.show(3, [shown])
        ours.finish(SUMMARY, [shown])
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    (picture,) = found.Images("run/timeline")
    assert (picture.step, picture.width, picture.height) == (3, 30, 20)
    (picture,) = found.Images("validation/0")
    assert (picture.step, picture.width) == (3, 800)


def test_the_timeline_of_an_earlier_run_is_not_told_as_that_of_this_one(tmp_path):
    Image.new("RGB", (30, 20), "red").save(tmp_path / "timeline.png")
    with reporter(tmp_path) as ours:
        ours.step(step=1, loss=1.0, memory_mb=9.0, halo=0.5, **STEP)
        ours.finish(SUMMARY, [])
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Tags()["images"] == ["run/loss"]
    assert "data:image/png" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("stops", [False, True])
def test_the_report_can_be_left_out(stops, tmp_path, caplog):
    with caplog.at_level(logging.INFO), reporter(tmp_path, "trainer.report=false") as ours:
        ours.step(step=1, loss=1.0, memory_mb=9.0, halo=0.5, **STEP)
        if stops:
            ours.stopped(SUMMARY, "Stopped.")
        else:
            ours.finish(SUMMARY, [])
    assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "summary.json").exists() != stops
    assert "report:" not in caplog.text


def test_no_password_of_an_address_is_in_the_report(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("['logger.mlflow.tracking_uri=a://b:c@d']")
    with reporter(tmp_path, "+store='https://me:secret@host:5000'") as ours:
        ours.finish(SUMMARY, [])
    text = (tmp_path / "report.html").read_text()
    assert "https://***@host:5000" in text
    assert "a://***@d" in text
    assert "secret" not in text
