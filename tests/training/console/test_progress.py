from __future__ import annotations

import logging

import pytest

from spatialdl.training.console import progress as module
from spatialdl.training.console.progress import StepProgress

STEP = {"loss": 0.125, "learning_rate": 0.05, "images_per_second": 12.34, "data_wait": 0.05}
STEP["memory_mb"] = 900.0
TOLD = "loss 0.125, lr 0.05, 12.3 images/s, data wait 5%, memory 943.7 MB"


@pytest.fixture
def clock(monkeypatch):
    """Clock controlled by the test."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def lines(caplog, clock, steps: int, seconds: float, done: int = 0) -> list[str]:
    with caplog.at_level(logging.INFO), StepProgress(steps, done, terminal=False) as progress:
        for _ in range(done, steps):
            clock[0] += seconds
            progress.update(**STEP)
    return [record.getMessage() for record in caplog.records]


def test_a_log_file_gets_a_few_lines(caplog, clock):
    found = lines(caplog, clock, steps=1000, seconds=0.5)
    assert len(found) == 11
    assert found[0] == f"step 1 of 1000: {TOLD}, 0:08:20 left"
    assert found[-1].startswith("step 1000 of 1000: ")
    assert found[-1].endswith(", 0:00:00 left")


def test_slow_steps_get_a_line_each(caplog, clock):
    assert len(lines(caplog, clock, steps=100, seconds=61)) == 100


def test_a_short_run_gets_a_line_a_step(caplog, clock):
    assert len(lines(caplog, clock, steps=3, seconds=1)) == 3


def test_a_resumed_run_goes_on_counting(caplog, clock):
    found = lines(caplog, clock, steps=100, seconds=1, done=90)
    assert found[0].startswith("step 91 of 100: ")
    assert found[0].endswith(", 0:00:09 left")


def test_a_terminal_gets_a_bar_and_messages_above_it(capsys, caplog, clock):
    with StepProgress(4, terminal=True) as progress:
        for _ in range(4):
            clock[0] += 1
            progress.update(**STEP)
    errors = capsys.readouterr().err
    assert "4/4" in errors
    assert TOLD in errors
    assert not caplog.records


@pytest.mark.parametrize(("variable", "expected"), [(None, False), ("1", True)])
def test_a_rank_draws_if_its_launcher_has_a_terminal(monkeypatch, variable, expected):
    monkeypatch.delenv("SPATIALDL_TERMINAL", raising=False)
    if variable:
        monkeypatch.setenv("SPATIALDL_TERMINAL", variable)
    assert module.has_terminal() == expected
