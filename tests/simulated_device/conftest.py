"""The device is there for every test of this folder, and idle, exact and on time after each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests import simulated_device


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    """The device, or the reason why there is none."""
    if not simulated_device.available():
        pytest.skip(str(simulated_device.missing()))
    simulated_device.load()


@pytest.fixture(autouse=True)
def leave_idle(device: None) -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.sim.set_delay(0)
    for index in range(torch.sim.device_count()):
        torch.sim.synchronize(index)
        torch.sim.set_stream(torch.sim.default_stream(index))
    torch.sim.set_device(0)


@pytest.fixture(params=[0, 300], ids=["at once", "delayed"])
def delays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Streams that work at once, and streams that dawdle at random."""
    torch.sim.set_delay(request.param, seed=7)
    yield
    torch.sim.set_delay(0)
