"""What simulated transports are made of: device-aware MPI, and messages queued in streams."""

from __future__ import annotations

import queue

import torch
from mpi4py import MPI
from torch import Tensor

from tests.simulated_device.device_aware_mpi import device_aware_mpi
from tests.simulated_device.holding import held


def exchanged(x: Tensor) -> Tensor:
    """A copy of a tensor that MPI made, on the device, at once."""
    landed = torch.zeros_like(x)
    torch.sim.synchronize()
    ours, theirs = (MPI.buffer.fromaddress(t.data_ptr(), t.nbytes) for t in (x, landed))
    MPI.COMM_SELF.Sendrecv(ours, 0, 0, theirs, 0, 0)
    return landed


def test_device_aware_mpi_moves_device_memory():
    with device_aware_mpi():
        x = torch.arange(1000.0, device="sim")
        assert torch.equal(exchanged(x), x)
        y = torch.arange(1000.0)
        assert torch.equal(exchanged(y), y)


def test_device_aware_mpi_waits_for_no_stream():
    with device_aware_mpi():
        landed = torch.zeros(3, device="sim")
        torch.sim.synchronize()
        with held():
            x = torch.ones(3, device="sim")
            ours, theirs = (MPI.buffer.fromaddress(t.data_ptr(), t.nbytes) for t in (x, landed))
            MPI.COMM_SELF.Sendrecv(ours, 0, 0, theirs, 0, 0)
        assert landed.isnan().all()


def send(x: Tensor, wire: queue.Queue[Tensor]) -> None:
    """As NCCL sends: in the current stream, of what lies there then; the host goes on."""
    view = torch.sim.host_view(x)
    torch.sim.enqueue(lambda: wire.put(view.clone()), torch.sim.current_stream(x.device))


def receive(x: Tensor, wire: queue.Queue[Tensor]) -> None:
    view = torch.sim.host_view(x)
    torch.sim.enqueue(lambda: view.copy_(wire.get()), torch.sim.current_stream(x.device))


def test_messages_in_streams(delays):
    wire: queue.Queue[Tensor] = queue.Queue()
    y = torch.zeros(3, device="sim:1")
    receive(y, wire)
    y.mul_(2)
    assert not torch.sim.current_stream(1).query()
    x = torch.ones(3, device="sim:0").add_(1)
    send(x, wire)
    x.zero_()
    assert y.tolist() == [4, 4, 4]


def test_where_the_host_waits():
    x = torch.ones(3, device="sim")
    with torch.sim.wait_sites(__file__) as sites:
        x.sum().item()
        torch.sim.synchronize()
    x.sum().item()
    found = {(kind, name): site for kind, name, site in sites}
    assert set(found) == {("item", ""), ("device", "")}
    assert all(site.startswith(__file__) for site in found.values())
    assert sum(sites.values()) == 2
