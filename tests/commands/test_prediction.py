"""How the predicting and the evaluating command end, whatever their work is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest
from omegaconf import DictConfig

from spatialdl.commands.prediction import Command


def one_rank(config: DictConfig) -> SimpleNamespace:
    return SimpleNamespace(world_size=1)


def refusal(config: DictConfig) -> SimpleNamespace:
    raise ValueError("table=xml must be csv or parquet")


@pytest.fixture
def ended(tmp_path, monkeypatch, capfd):
    """The exit code of a command with such parts, and what it prints as errors."""
    monkeypatch.chdir(tmp_path)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(check: Callable, work: Callable, *words: str) -> tuple[int, str]:
        @hydra.main(version_base="1.3", config_path="pkg://spatialdl.conf", config_name="predict")
        def application(config: DictConfig) -> None:
            command.start(config)

        command = Command("predict", application, check, None, work, "error: see {run_dir}")
        monkeypatch.setattr(sys, "argv", ["predict", *words])
        code = 0
        try:
            command.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, capfd.readouterr().err

    return run


WORDS = ("ckpt_path=run", "hydra.run.dir=here")


@pytest.mark.parametrize("succeeds", [True, False])
def test_it_fails_where_the_work_did_not_succeed(ended, tmp_path, succeeds):
    seen = []

    def work(config: DictConfig, run_dir: Path, world: object) -> bool:
        seen.append((str(config.ckpt_path), run_dir))
        return succeeds

    code, errors = ended(one_rank, work, *WORDS)
    assert seen == [("run", tmp_path / "here")]
    assert code == (0 if succeeds else 1)
    assert (f"error: see {tmp_path / 'here'}" in errors) is not succeeds
    assert (tmp_path / "here" / "predict.log").is_file()


def test_a_mistake_is_one_line_and_nothing_is_done(ended):
    assert ended(refusal, pytest.fail, *WORDS) == (1, "error: table=xml must be csv or parquet\n")
    code, errors = ended(one_rank, pytest.fail, *WORDS, "tabel=csv")
    assert code == 1
    assert "tabel is unknown; nearest: table" in errors


def test_help_needs_no_configuration(ended):
    assert ended(pytest.fail, pytest.fail, "--help") == (0, "")
