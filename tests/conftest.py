"""One thread a process, as make sets it; property tests are not timed, for machines are busy."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from copy import deepcopy

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files of few tests first, which start processes: no worker is alone with one at the end."""
    if hasattr(config, "workerinput"):
        counts = Counter(item.path for item in items)
        items.sort(key=lambda item: counts[item.path])


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


@pytest.fixture(scope="session", autouse=True)
def configuration_files() -> Iterator[None]:
    """Hydra reads those of packages once: parsing them is half of the time of composing."""
    from hydra._internal.core_plugins.importlib_resources_config_source import (
        ImportlibResourcesConfigSource as Files,
    )

    kept: dict[tuple[str, str, str], object] = {}
    read = Files.load_config

    def load(files: Files, config_path: str) -> object:
        name = files.provider, files.path, config_path
        if name not in kept:
            kept[name] = read(files, config_path)
        return deepcopy(kept[name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Files, "load_config", load)
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


@pytest.hookimpl(wrapper=True)  # a fixture for each test would cost more
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """A command in the process of a test leaves nothing that would change other tests.

    Neither its handlers of signals, nor signals that it kept, nor filters of the log, which hide
    warnings.
    """
    before = {number: signal.getsignal(number) for number in early_signals.STOPPING}
    result = yield
    signal.set_wakeup_fd(-1)  # of a run, whose thread would end this process at the next signal
    early_signals.take()
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    for one in logging.root.handlers:
        one.filters.clear()
    return result


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
