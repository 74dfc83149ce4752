"""One thread a process, as make sets it; property tests are not timed, for machines are busy."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports PyTorch
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # of ranks that tests start

import pytest
from hypothesis import HealthCheck, settings

from spatialdl.comm import early_signals
from spatialdl.comm.launch import launched

HIDE_DEVICES = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",  # HIP ignores an empty value
    "ROCR_VISIBLE_DEVICES": "-1",
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",
}
# Tests expect CPU results, and the GPUs of a shared machine may be busy: none is visible here or in
# processes that tests start, unless SPATIALDL_DEVICE names one, as `make test-gpu` does.
if os.environ.get("SPATIALDL_DEVICE", "cpu") in ("cpu", "sim"):
    os.environ.update(HIDE_DEVICES)

settings.register_profile(
    "quick",
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("quick")


MOST_SECONDS = 15
TAKE_LONGER: dict[str, str] = {}
"""Tests that may take more than `MOST_SECONDS`, ten at most, each with its reason."""


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name tests that take too long; they do not fail, as machines are busy at times."""
    taken: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                taken[report.nodeid] += report.duration
    for test, seconds in taken.most_common():
        if seconds > MOST_SECONDS and test not in TAKE_LONGER:
            said = f"warning: {test} took {seconds:.0f} s, more than {MOST_SECONDS}"
            terminalreporter.write_line(said)


def pytest_configure(config: pytest.Config) -> None:
    """Cases of a longer proof are collected where slow tests are asked for (-m slow)."""
    if re.search(r"(?<!not )\bslow\b", config.getoption("markexpr", "")):
        os.environ.setdefault("SPATIALDL_SLOW", "1")


# Shells let what a script runs in the background ignore it, and all that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def sessions_of_open_mpi() -> Iterator[None]:
    """A folder for them: no mpiexec starts where a killed one of its number has left its own."""
    if launched() is not None:  # ranks, which start none
        yield
        return
    with (
        tempfile.TemporaryDirectory("", "open-mpi-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PRTE_MCA_prte_local_tmpdir_base", folder)
        yield


@pytest.fixture
def run_main(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the `main` of a command in this process: its exit code, and all that it prints."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):  # whoever started the tests
        monkeypatch.delenv(name, raising=False)

    def run(main: Callable[[], None], *words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["command", *words])
        code: object = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capfd.readouterr()
        said = captured.out + captured.err
        return (1, f"{said}{code}\n") if isinstance(code, str) else (int(str(code)), said)

    return run


@pytest.fixture(autouse=True)
def filters_of_the_log() -> Iterator[None]:
    """A run in the process of a test leaves none: they would hide warnings that it has logged."""
    yield
    for handler in logging.root.handlers:
        handler.filters.clear()


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """A command in the process of a test leaves neither its handlers nor signals that it kept."""
    before = {number: signal.getsignal(number) for number in early_signals.STOPPING}
    yield
    signal.set_wakeup_fd(-1)  # of a run, whose thread would end this process at the next signal
    early_signals.take()
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def clean() -> Iterator[None]:
    """The root's handlers as they were."""
    from spatialdl.training.console import run_log

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
