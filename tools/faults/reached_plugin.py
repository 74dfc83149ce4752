"""Plugin of pytest: which part of the suite this is, and what each test took and gave."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_SEEN: dict[str, list[float | str]] = {}


def pytest_configure(config: pytest.Config) -> None:
    on_tiles = os.environ.get("SPATIALDL_GRIDS") == "tiles"
    ranks = "tiles" if on_tiles else os.environ.get("OMPI_COMM_WORLD_SIZE", "0")
    device = [os.environ.get(f"SPATIALDL_{name}", "") for name in ("DEVICE", "DEVICE_PATH")]
    # a test that starts a pytest of its own keeps the outer part
    os.environ.setdefault("SPATIALDL_FAULTS_PART", " ".join([ranks, *device]).strip())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    taken, outcome = _SEEN.get(report.nodeid, [0.0, "passed"])
    worse = report.outcome if report.outcome != "passed" else outcome
    _SEEN[report.nodeid] = [float(taken) + report.duration, worse]


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder = os.environ.get("SPATIALDL_FAULTS_RECORD")
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if folder and not is_worker and os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0" and _SEEN:
        name = f"{os.environ['SPATIALDL_FAULTS_PART'] or '0'}-{os.getpid()}.took"
        Path(folder, name.replace(" ", "_")).write_text(json.dumps(_SEEN))
