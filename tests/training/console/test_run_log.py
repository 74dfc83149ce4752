from __future__ import annotations

import logging
import sys
import warnings

import pytest

from spatialdl.training.console import progress as module
from spatialdl.training.console import run_log
from spatialdl.training.console.progress import StepProgress


@pytest.mark.usefixtures("clean")
def test_rank_0_says_a_warning_once_here_and_in_the_file(tmp_path, capsys):
    (tmp_path / "train.log").write_text("an earlier run\n")
    run_log.start_log(rank=0)
    log = logging.getLogger("spatialdl.somewhere")
    log.info("before")
    with run_log.log_to_file(tmp_path / "train.log"):
        for _ in range(3):
            log.warning("slow disk %d", 1)
            log.info("going on")
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("from Python", stacklevel=1)
        log.warning("slow disk %d", 2)
    log.info("after")
    first, *lines = (tmp_path / "train.log").read_text().splitlines()
    assert first == "an earlier run"
    assert not any(line.endswith((" before", " after")) for line in lines)
    for text in (capsys.readouterr().out, (tmp_path / "train.log").read_text()):
        assert text.count("slow disk 1") == text.count("slow disk 2") == 1
        assert text.count("UserWarning: from Python") == 1
        assert text.count("going on") == 3


@pytest.mark.usefixtures("clean")
def test_another_rank_is_silent_but_for_errors(capsys):
    run_log.start_log(rank=3)
    log = logging.getLogger("spatialdl.somewhere")
    log.info("fine")
    for _ in range(2):
        log.warning("slow disk")
    assert capsys.readouterr() == ("", "")
    assert run_log.kept_warnings() == 1
    log.error("broken disk")
    assert "[rank 3][spatialdl.somewhere][ERROR] - broken disk\n" in capsys.readouterr().out
    for handler in logging.getLogger().handlers:  # as when it dies
        handler.flush()
    assert capsys.readouterr().err == "rank 3: slow disk\n"
    assert run_log.kept_warnings() == 0


@pytest.mark.usefixtures("clean")
def test_warnings_appear_once_above_a_bar_too(capsys):
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], force=True)
    run_log.warn_once()
    with StepProgress(2, terminal=True):
        for _ in range(3):
            logging.getLogger("spatialdl.somewhere").warning("slow disk")
    said = capsys.readouterr()
    assert (said.out + said.err).count("slow disk") == 1


@pytest.mark.usefixtures("clean")
def test_a_full_disk_is_said_once_and_no_error_of_ours(tmp_path, capsys):
    (tmp_path / "train.log").symlink_to("/dev/full")
    run_log.start_log(rank=0)
    log = logging.getLogger("spatialdl.somewhere")
    with run_log.log_to_file(tmp_path / "train.log"):
        for step in range(3):
            log.info("step %d", step)
        said = capsys.readouterr()
        assert said.out.count("step ") == 3
        assert said.err == f"cannot write to {tmp_path}/train.log: No space left on device\n"
        log.info("%d", "no number")
        assert "Logging error" in capsys.readouterr().err


STEP = {"loss": 0.125, "learning_rate": 0.05, "images_per_second": 12.34, "data_wait": 0.05}
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
            progress.update(STEP, memory_mb=900.0)
    return [record.getMessage() for record in caplog.records]


def test_a_log_file_gets_a_few_lines(caplog, clock):
    found = lines(caplog, clock, steps=1000, seconds=0.5)
    assert len(found) == 11
    assert found[0] == f"step 1 of 1000: {TOLD}, 0:08:20 left"
    assert found[-1].startswith("step 1000 of 1000: ")
    assert found[-1].endswith(", 0:00:00 left")


@pytest.mark.parametrize(("steps", "seconds"), [(100, 61), (3, 1)])
def test_slow_steps_and_those_of_a_short_run_get_a_line_each(caplog, clock, steps, seconds):
    assert len(lines(caplog, clock, steps, seconds)) == steps


def test_a_resumed_run_goes_on_counting(caplog, clock):
    found = lines(caplog, clock, steps=100, seconds=1, done=90)
    assert found[0].startswith("step 91 of 100: ")
    assert found[0].endswith(", 0:00:09 left")


def test_a_terminal_gets_a_bar_and_messages_above_it(capsys, caplog, clock):
    with StepProgress(4, terminal=True) as progress:
        for _ in range(4):
            clock[0] += 1
            progress.update(STEP, memory_mb=900.0)
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
