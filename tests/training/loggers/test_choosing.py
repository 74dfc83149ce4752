from __future__ import annotations

import logging

import pytest
from omegaconf import OmegaConf

from spatialdl.training.loggers import choosing
from spatialdl.training.loggers.choosing import Loggers, check_loggers, wants_images

TENSORBOARD = OmegaConf.create({"logger": {"csv": {}, "tensorboard": {"images": True}}})


def test_unknown_loggers_and_missing_packages_are_refused(monkeypatch):
    check_loggers(TENSORBOARD.logger)
    with pytest.raises(ValueError, match="logger=comet is unknown: use some of csv, tensorboard"):
        check_loggers({"comet": {}})
    monkeypatch.setitem(choosing.PACKAGES, "wandb", "a_package_that_nobody_has")
    with pytest.raises(ValueError, match=r'logger=wandb needs .* pip install "spatialdl\[wandb\]"'):
        check_loggers({"wandb": {}})


def test_pictures_are_made_if_a_logger_takes_them():
    assert wants_images(TENSORBOARD.logger)
    assert not wants_images({"csv": {}, "tensorboard": {"images": False}})


class Full:
    """A logger whose disk is full from the second step on."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.finished = 0

    def log_step(self, step: int, values: dict[str, float]) -> None:
        if step > 1:
            raise OSError("no space left")
        self.steps.append(step)

    def finish(self) -> None:
        self.finished += 1
        raise OSError("nor here")


def test_a_logger_that_fails_is_said_once_and_left_out(tmp_path, caplog):
    loggers, full, other = Loggers(OmegaConf.create({}), tmp_path, 0), Full(), Full()
    other.log_step = lambda step, values: other.steps.append(step)  # type: ignore[method-assign]
    loggers._open = {"wandb": full, "mlflow": other}  # type: ignore[dict-item]
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            loggers.log_step(step, {"loss": 1.0})
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
    loggers.log_step(1, {"loss": 1.0})
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
