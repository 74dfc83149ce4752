from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from spatialdl.training import loggers as module
from spatialdl.training.loggers import Loggers, MLflow, TensorBoard, WandB, check_loggers

TENSORBOARD = OmegaConf.create({"logger": {"csv": {}, "tensorboard": {}}})


def test_unknown_loggers_and_missing_packages_are_refused(monkeypatch):
    check_loggers(TENSORBOARD.logger)
    with pytest.raises(ValueError, match="logger=comet is unknown: use some of csv, tensorboard"):
        check_loggers({"comet": {}})
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'logger=wandb needs .* pip install "spatialdl\[wandb\]"'):
        check_loggers({"wandb": {}})


class Full:
    """A logger whose disk is full from the second step on."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.finished = 0

    def log(self, step: int, values: dict[str, float]) -> None:
        if step > 1:
            raise OSError("no space left")
        self.steps.append(step)

    def finish(self) -> None:
        self.finished += 1
        raise OSError("nor here")


def test_a_logger_that_fails_is_said_once_and_left_out(tmp_path, caplog):
    loggers, full, other = Loggers(OmegaConf.create({}), tmp_path, 0), Full(), Full()
    other.log = lambda step, values: other.steps.append(step)  # type: ignore[method-assign]
    loggers._open = {"wandb": full, "mlflow": other}  # type: ignore[dict-item]
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            loggers.log("train", step, {"loss": 1.0})
    assert (full.steps, other.steps) == ([1], [1, 2, 3])
    assert (full.finished, other.finished) == (1, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "logger=wandb: no space left; training continues without it"
    ]
    loggers.close()
    assert other.finished == 1


def test_a_logger_that_cannot_start_ends_no_run(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file in the way")
    loggers = Loggers(TENSORBOARD, tmp_path, 0)
    loggers.log("train", 1, {"loss": 1.0})
    loggers.close()
    assert [record.getMessage()[:19] for record in caplog.records] == ["logger=tensorboard:"]


def test_no_logger_gets_the_passwords_of_addresses(tmp_path, caplog):
    uri = "https://me:secret@host:5000/?a=b"
    loggers = Loggers(OmegaConf.merge(TENSORBOARD, {"uris": [uri]}), tmp_path, 0)
    loggers._each(lambda _: (_ for _ in ()).throw(ValueError(f"cannot reach {uri}")))
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"https://***@host:5000/?a=b" in events.read_bytes()
    assert b"secret" not in events.read_bytes()
    assert "cannot reach https://***@host" in caplog.text
    assert "secret" not in caplog.text


@pytest.fixture
def numbered_from_nought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one second and process are read in the order of their names, and 10 before 9."""
    counter = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)


def events(run_dir: Path) -> EventAccumulator:
    found = EventAccumulator(str(run_dir / "tensorboard"))
    found.Reload()
    return found


def log_steps(run_dir: Path, steps: range, done: int = 0) -> None:
    logger = TensorBoard(OmegaConf.create(), run_dir, {"optimizer": {"lr": 0.1}}, done)
    for step in steps:
        logger.log(step, {"train/loss": 1 / step, "train/halo": 0.25})
    logger.log(steps[-1], {"validation/accuracy": 0.5, "validation/loss": math.nan})
    logger.log_image(steps[-1], "sample 0", np.full((4, 5, 3), 200, np.uint8))
    logger.finish()


def test_what_was_logged_can_be_read(tmp_path):
    log_steps(tmp_path, range(1, 4))
    found = events(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [
        *((1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)))
    ]
    assert [e.value for e in found.Scalars("validation/accuracy")] == [0.5]
    assert math.isnan(found.Scalars("validation/loss")[0].value)
    (picture,) = found.Images("sample 0")
    assert (picture.height, picture.width, picture.step) == (4, 5, 3)
    (text,) = found.Tensors("config/text_summary")
    assert b"lr: 0.1" in text.tensor_proto.string_val[0]


@pytest.mark.usefixtures("numbered_from_nought")
@pytest.mark.parametrize("done", [0, 3])
def test_steps_of_a_run_that_was_killed_after_its_checkpoint_go(done, tmp_path):
    """Those of one that had no checkpoint yet were shown twice."""
    log_steps(tmp_path, range(1, 6))
    log_steps(tmp_path, range(done + 1, 8), done)
    assert [e.step for e in events(tmp_path).Scalars("train/loss")] == list(range(1, 8))


MLFLOW = {"tracking_uri": None, "experiment": "tests", "name": "mine"}


def test_a_run_of_mlflow_is_in_its_directory_and_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for steps, rate in (((1, 2), 0.1), ((3,), 0.2)):
        config = {"optimizer": {"lr": rate}, "weights": None, "logger": {"csv": {}}}
        logger = MLflow(OmegaConf.create(MLFLOW), tmp_path, config, 0)
        for step in steps:
            logger.log(step, {"train/loss": 1 / step, "train/bad": math.nan})
        logger.log_image(steps[-1], "sample 0", np.full((4, 5, 3), 200, np.uint8))
        logger.finish()
    client, run = logger._client, logger._client.get_run(logger._id)
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params == {"optimizer.lr": "0.1", "weights": "None", "logger.csv": "{}"}
    history = client.get_metric_history(logger._id, "train/loss")
    assert [(one.step, one.value) for one in history] == [
        *((1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)))
    ]
    assert "train/bad" not in run.data.metrics
    files = [one.path for one in client.list_artifacts(logger._id, "sample 0")]
    assert files == ["sample 0/00000002.png", "sample 0/00000003.png"]


WANDB = {"project": "spatialdl", "entity": None, "name": None, "mode": "offline"}


def test_an_offline_run_of_wandb_is_in_the_run_directory_and_goes_on(tmp_path):
    pytest.importorskip("wandb")

    identities = []
    for _ in range(2):
        logger = WandB(OmegaConf.create(WANDB), tmp_path, {"optimizer": {"lr": 0.1}}, 0)
        logger.log(1, {"train/loss": 0.5})
        logger.log_image(1, "sample 0", np.full((4, 5, 3), 200, np.uint8))
        assert logger._run.summary["train/loss"] == 0.5
        assert logger._run.config["optimizer"] == {"lr": 0.1}
        logger.finish()
        identities.append((tmp_path / "wandb.id").read_text())
    assert identities[0] == identities[1]
    written = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 2
    assert any(b"train/loss" in file.read_bytes() for file in written)
    assert list((tmp_path / "wandb").glob("offline-run-*/files/media/images/sample 0*.png"))
