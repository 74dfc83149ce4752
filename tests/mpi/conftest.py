"""MPI tests: every rank runs pytest; the first failure on any rank ends the job.

``SPATIALDL_TRANSPORT=torch`` runs them over torch.distributed instead of MPI.
``SPATIALDL_DEVICE=sim`` has `equality.check` and its like compute on the simulated accelerator, one
for each rank, or as many as ``SPATIALDL_DEVICES`` says, and ``SPATIALDL_DEVICE_PATH`` says how its
tensors travel.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from mpi4py import MPI

from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.world import start_world
from tests.mpi.device import lacking, put_on
from tests.mpi.equality import (  # fixtures for all, too
    CHOSEN_GRIDS,
    ON_TILES,
    grids_of_the_case,  # noqa: F401
    meshes,  # noqa: F401
)
from tests.mpi.groups import ends_process_group, over_gloo, over_mpi4py  # noqa: F401

torch.set_num_threads(1)
torch.manual_seed(0)  # modules that tests make when they are imported are the same on all ranks
TRANSPORT = os.environ.get("SPATIALDL_TRANSPORT", "mpi")
WORLD = start_world(TRANSPORT)
DEVICE, LACKING = put_on(WORLD), lacking(WORLD)


def pytest_report_header(config: pytest.Config) -> str:
    vendor, version = MPI.get_vendor()
    library = f"{vendor} {'.'.join(map(str, version))}"
    where = f"rank {WORLD.rank} of {WORLD.size} on {DEVICE}"
    return f"MPI: {library}, transport: {TRANSPORT}, {where}"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if MPI.COMM_WORLD.rank != 0:  # one report is enough; failures speak for themselves
        session.config.pluginmanager.unregister(name="terminalreporter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Virtual tiles run the tests that are marked so, and four ranks the others."""
    if ON_TILES:
        left = [item for item in items if not item.get_closest_marker("tiles")]
    elif MPI.COMM_WORLD.size == 4 and not CHOSEN_GRIDS:
        marked = [item for item in items if item.get_closest_marker("tiles")]
        left = [item for item in marked if not item.get_closest_marker("slow")]
    else:
        return
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if LACKING:
        pytest.skip(LACKING)
    # ranks compare their calls, except where operations run as users run them: half the messages
    operations = item.path.parent.name in ("channels", "spatial") and MPI.COMM_WORLD.size != 2
    check.enable(not operations or item.path.name == "test_op_db.py")
    wanted = item.get_closest_marker("world")
    if wanted is not None and MPI.COMM_WORLD.size not in wanted.args:
        sizes = " or ".join(map(str, wanted.args))
        pytest.skip(f"needs a world of {sizes} ranks, this one has {MPI.COMM_WORLD.size}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    if report.failed and MPI.COMM_WORLD.size > 1:
        # the others may wait for this rank in a collective, for ever
        print(f"\nrank {MPI.COMM_WORLD.rank} failed in {item.nodeid}", file=sys.__stderr__)
        print(report.longreprtext, file=sys.__stderr__, flush=True)
        MPI.COMM_WORLD.Abort(1)
    return report


@pytest.fixture(autouse=True)
def alike() -> None:
    """Images and weights that tests draw are the same on all ranks."""
    if (
        DEVICE.type == "cpu"
    ):  # else PyTorch formats the whole stack, three times, for devices to come
        torch.default_generator.manual_seed(0)
    else:
        torch.manual_seed(0)


@pytest.fixture
def world() -> Communicator:
    return WORLD
