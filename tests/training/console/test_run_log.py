from __future__ import annotations

import logging
import sys
import warnings
from contextlib import suppress

import pytest

from spatialdl.training.console import run_log


@pytest.fixture
def clean():
    """The root's handlers as they were."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logging.captureWarnings(False)  # commands that ran in this process have left it on
    yield
    for handler in root.handlers:
        if handler not in handlers:
            with suppress(OSError):  # a full disk
                handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    run_log._State.once = run_log._State.kept = None


@pytest.mark.usefixtures("clean")
def test_rank_0_says_a_warning_once_here_and_in_the_file(tmp_path, capsys):
    run_log.start_log(rank=0)
    log = logging.getLogger("spatialdl.somewhere")
    with run_log.log_to_file(tmp_path / "train.log"):
        for _ in range(3):
            log.warning("slow disk %d", 1)
            log.info("going on")
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("from Python", stacklevel=1)
        log.warning("slow disk %d", 2)
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
def test_a_file_gets_what_is_said_meanwhile_behind_what_is_there(tmp_path):
    file = tmp_path / "train.log"
    file.write_text("an earlier run\n")
    run_log.start_log(rank=0)
    log = logging.getLogger("spatialdl.somewhere")
    log.info("before")
    with run_log.log_to_file(file):
        log.info("meanwhile")
    log.info("after")
    first, second = file.read_text().splitlines()
    assert first == "an earlier run"
    assert second.endswith("[spatialdl.somewhere][INFO] - meanwhile")


@pytest.mark.usefixtures("clean")
def test_warnings_appear_once_above_a_bar_too(capsys):
    from spatialdl.training.console.progress import StepProgress

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
