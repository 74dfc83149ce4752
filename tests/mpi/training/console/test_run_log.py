"""Warnings of other ranks are logged by rank 0."""

from __future__ import annotations

import logging

import pytest

from spatialdl.training.console import run_log


@pytest.fixture
def clean():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    run_log._State.once = run_log._State.kept = None


@pytest.mark.usefixtures("clean")
def test_all_ranks_warn_once_together(world, capsys):
    run_log.start_log(world.rank)
    log = logging.getLogger("spatialdl.somewhere")
    log.warning("everybody says this")
    if world.rank == world.size - 1:
        log.warning("the last one has a slow disk")
    if world.rank > 0:
        log.warning("all but the first are cold")
        assert run_log.kept_warnings() >= 2
    for _ in range(2):
        run_log.log_warnings(world)
    assert run_log.kept_warnings() == 0
    said = capsys.readouterr().out
    if world.rank > 0 or world.size == 1:
        assert world.size == 1 or said == ""
        return
    lines = [line.rpartition(" - ")[2] for line in said.splitlines()]
    cold = "rank 1" if world.size == 2 else f"{world.size - 1} ranks, first 1"
    assert sorted(lines) == sorted(
        [
            "everybody says this",
            f"rank {world.size - 1}: the last one has a slow disk",
            f"{cold}: all but the first are cold",
        ]
    )
