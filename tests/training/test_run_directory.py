from __future__ import annotations

import json
import math

import pytest
from omegaconf import OmegaConf

from spatialdl.training.run_directory import RunDirectory, earlier_steps
from tests.fitting import without_pictures
from tests.training.checkpoints.runs import table as rows


@pytest.fixture(autouse=True)
def undrawn():
    with without_pictures():
        yield


CONFIG = OmegaConf.create(
    {"model": {"_target_": "spatialdl.models.resnet18"}, "parallel": {"name": "sp+pp"}}
)
WORLD = {"world_size": 3, "peak_memory_mb": [1.0, 2.0, 3.0]}


def log(run: RunDirectory, steps: int, loss: float = 1 / 3) -> None:
    for step in range(1, steps + 1):
        rate = 1.0 if step == 1 else 8.0
        row = {"step": step, "epoch": 1, "loss": loss / step, "learning_rate": 0.1}
        run.log_step({**row, "images_per_second": rate, "data_wait": 0.25})


def test_every_step_is_on_disk_at_once_with_all_its_digits(tmp_path):
    run = RunDirectory(tmp_path / "new", CONFIG)
    log(run, 2)
    found = rows(tmp_path / "new" / "metrics.csv")
    assert [float(row["loss"]) for row in found] == [1 / 3, 1 / 6]
    assert found[0] == {
        "step": "1",
        "epoch": "1",
        "loss": repr(1 / 3),
        "learning_rate": "0.1",
        "images_per_second": "1.0",
        "data_wait": "0.25",
    }


def test_summary_has_what_others_read(tmp_path):
    with RunDirectory(tmp_path, CONFIG) as run:
        log(run, 3)
        run.log_validation(step=3, loss=0.5, accuracy=0.75, samples=8)
        run.finish({**WORLD, "extra": "kept", "images_per_second": 5.0})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {
        "loss": [1 / 3, 1 / 6, 1 / 9],
        "images_per_second": 5.0,
        "parallel": "sp+pp",
        "validation": [{"step": 3, "loss": 0.5, "accuracy": 0.75, "samples": 8}],
        **WORLD,
        "extra": "kept",
    }
    assert rows(tmp_path / "validation.csv") == [
        {"step": "3", "loss": "0.5", "accuracy": "0.75", "samples": "8"}
    ]
    assert not list(tmp_path.glob("*.part"))


def test_a_summary_that_cannot_be_written_leaves_none(tmp_path):
    run = RunDirectory(tmp_path, CONFIG)
    log(run, 1)
    with pytest.raises(TypeError):
        run.finish({**WORLD, "extra": object()})
    assert not (tmp_path / "summary.json").exists()


def test_files_of_an_earlier_run_are_replaced(tmp_path):
    run = RunDirectory(tmp_path, CONFIG)
    log(run, 3)
    run.log_validation(step=3, loss=0.5, accuracy=0.75, samples=8)
    run.finish(WORLD)
    (tmp_path / f".{'0' * 32}.tmp").write_text("half of metrics.csv, of a killed run")
    RunDirectory(tmp_path, CONFIG)
    assert rows(tmp_path / "metrics.csv") == []
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize("steps", [0, 50])
def test_a_run_that_diverged_or_made_no_step_is_written_too(tmp_path, steps):
    run = RunDirectory(tmp_path, CONFIG)
    log(run, steps, math.nan)
    run.finish(WORLD)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["loss"] == [None] * steps  # JSON knows neither NaN nor infinity
    assert found["images_per_second"] == (8.0 if steps else None)


def test_rows_of_an_earlier_run_are_kept_up_to_a_step(tmp_path):
    run = RunDirectory(tmp_path, CONFIG)
    log(run, 5)
    run.close()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("6,1,0.")  # killed in the middle of a row
    kept = earlier_steps(tmp_path, 3)
    assert [row["step"] for row in kept] == [1, 2, 3]
    assert [row["step"] for row in earlier_steps(tmp_path, 9)] == [1, 2, 3, 4, 5]
    assert earlier_steps(tmp_path / "nowhere", 3) == []
    whole = (tmp_path / "metrics.csv").read_bytes()
    for bad, steps in ((b"7,1,1,1,1,1,1\n", [1, 2, 3, 4, 5]), (b"\xff", []), (b"a" * 200_000, [])):
        (tmp_path / "metrics.csv").write_bytes(whole + b"\n" + bad)
        assert [row["step"] for row in earlier_steps(tmp_path, 9)] == steps
    earlier = [{"step": 3, "loss": 0.5, "accuracy": 0.75, "samples": 8, "dice": [1.0]}]
    with RunDirectory(tmp_path, CONFIG, kept, earlier) as run:
        run.log_validation(step=6, loss=0.25, accuracy=1.0, samples=8, dice=[0.5])
        run.finish(WORLD)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["loss"] == [1 / 3, 1 / 6, 1 / 9]
    assert [row["dice"] for row in summary["validation"]] == [[1.0], [0.5]]
    assert [row["step"] for row in rows(tmp_path / "validation.csv")] == ["3", "6"]


def test_a_run_that_goes_on_keeps_all_columns_of_the_steps_before(tmp_path):
    """Those beside the usual were empty up to the checkpoint."""
    columns = ["halo", "loss_scale", "skipped"]
    numbers = {"images_per_second": 7.5, "data_wait": 0.25, "loss": 1e-05, "learning_rate": 0.1}
    with RunDirectory(tmp_path, CONFIG, columns=columns) as run:
        for step in (1, 2):
            more = {"halo": 0.125, "loss_scale": 65536.0, "skipped": 1}
            run.log_step({"step": step, "epoch": 0, **numbers, **more})
    before = (tmp_path / "metrics.csv").read_text()
    RunDirectory(tmp_path, CONFIG, earlier_steps(tmp_path, 2), columns=columns).close()
    assert (tmp_path / "metrics.csv").read_text() == before
    RunDirectory(tmp_path, CONFIG, earlier_steps(tmp_path, 2), columns=[*columns, "more"]).close()
    assert [row["more"] for row in rows(tmp_path / "metrics.csv")] == ["", ""]


def test_rows_that_cannot_be_written_are_written_later(tmp_path, caplog):
    """The files are on a device that is full, and then are not."""
    run = RunDirectory(tmp_path, CONFIG)
    log(run, 2)
    run._metrics._file.close()
    run._metrics._file = open("/dev/full", "w", newline="")  # noqa: SIM115
    log(run, 1)
    assert len(rows(tmp_path / "metrics.csv")) == 2
    assert "No space left on device; rows are buffered" in caplog.text
    log(run, 1)
    assert len(rows(tmp_path / "metrics.csv")) == 4
    run.close()


def test_validations_that_cannot_be_written_are_written_later(tmp_path, caplog):
    """From the first one on, for which there is no file yet."""
    run = RunDirectory(tmp_path / "run", CONFIG)
    log(run, 1)
    (tmp_path / "run").rename(tmp_path / "away")
    run.log_validation(step=1, loss=0.5)
    run.log_validation(step=2, loss=0.25)
    assert caplog.text.count("rows are buffered and written later") == 1
    (tmp_path / "away").rename(tmp_path / "run")
    run.log_validation(step=3, loss=0.125)
    run.close()
    assert [row["step"] for row in rows(tmp_path / "run" / "validation.csv")] == ["1", "2", "3"]
