"""Streams run later, in order, and missing synchronisation shows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

from spatialdl.spatial.random import keyed
from tests.simulated_device.device_aware_mpi import device_aware_mpi


def test_a_missing_wait_shows():
    side = torch.Stream("sim")
    x = torch.zeros(3, device="sim")
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.held(side):
        with side:
            x.add_(1)
        assert x.tolist() == [0, 0, 0]
    torch.sim.current_stream().wait_stream(side)
    assert x.tolist() == [1, 1, 1]


def test_freed_memory_serves_its_stream_again_and_is_not_a_number():
    x = torch.ones(1000, device="sim")
    address = x.data_ptr()
    del x
    again = torch.empty(1000, device="sim")
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_a_tensor_freed_while_another_stream_reads_it_is_lost():
    side = torch.Stream("sim")
    x = torch.ones(1000, device="sim")
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.held(side):
        with side:
            y = x + 1
        del x
        torch.empty(1, device="sim")  # it could have been given that memory
        torch.sim.current_stream().synchronize()
    side.synchronize()
    assert y.isnan().all()


def test_freed_memory_may_be_read_until_its_stream_allocates_again():
    """A stream may wait for the readers only then, as that of FSDP2's gradients does."""
    side = torch.Stream("sim")
    with side:
        x = torch.ones(1000, device="sim")
    torch.sim.current_stream().wait_stream(side)
    with torch.sim.held():
        y = x + 1
        del x
        side.synchronize()
        side.wait_stream(torch.sim.current_stream())
        with side:
            again = torch.empty(1000, device="sim")
    assert (y == 2).all()
    side.synchronize()
    assert again.isnan().all()


def test_a_pinned_target_is_written_later():
    x = torch.ones(3, device="sim")
    landing = torch.zeros(3).pin_memory()
    event = torch.Event("sim")
    with torch.sim.held():
        landing.copy_(x, non_blocking=True)
        event.record()
        assert landing.tolist() == [0, 0, 0]
    event.synchronize()
    assert landing.tolist() == [1, 1, 1]


def test_an_error_in_a_stream_is_raised_where_the_host_waits():
    table = torch.ones(4, 2, device="sim")
    far = torch.nn.functional.embedding(torch.tensor([7], device="sim"), table)
    assert far.shape == (1, 2)
    with pytest.raises(RuntimeError, match=r"aten::(embedding|index_select).* failed on sim: "):
        torch.sim.synchronize()
    torch.sim.synchronize()
    assert table.sum().item() == 8


def test_device_aware_mpi_moves_device_memory_and_waits_for_no_stream():
    def exchange(x: Tensor, landed: Tensor) -> None:
        ours, theirs = (MPI.buffer.fromaddress(t.data_ptr(), t.nbytes) for t in (x, landed))
        MPI.COMM_SELF.Sendrecv(ours, 0, 0, theirs, 0, 0)

    with device_aware_mpi():
        for device in ("sim", "cpu"):
            x, landed = torch.arange(1000.0, device=device), torch.zeros(1000, device=device)
            torch.sim.synchronize()
            exchange(x, landed)
            assert torch.equal(landed, x)
        landed = torch.zeros(3, device="sim")
        torch.sim.synchronize()
        with torch.sim.held():
            exchange(torch.ones(3, device="sim"), landed)
        assert landed.isnan().all()


def test_waits_copies_and_launches_are_counted_and_the_lines_that_wait_are_named():
    x, plain, pinned = torch.ones(4, device="sim"), torch.ones(4), torch.ones(4).pin_memory()
    to_host, to_device = {"to the host": 1}, {"to the device": 1}
    for do, waits, copies, launches in (
        (lambda: x.add_(1).relu(), 0, {}, 2),
        (lambda: x.view(2, 2).t()[1:], 0, {}, 0),
        (lambda: torch.empty_like(x), 0, {}, 0),
        (x.cpu, 1, to_host, 0),
        (lambda: plain.to("sim"), 1, to_device, 0),
        (lambda: torch.tensor([1.0], device="sim"), 1, to_device, 0),
        (lambda: x.new_tensor([1.0]), 1, to_device, 0),
        (lambda: pinned.to("sim", non_blocking=True), 0, to_device, 0),
        (lambda: x.copy_(plain), 1, to_device, 0),
        (lambda: x.copy_(plain, non_blocking=True), 0, to_device, 0),
        (lambda: pinned.copy_(x), 1, to_host, 0),
        (lambda: pinned.copy_(x, non_blocking=True), 0, to_host, 0),
        (lambda: plain.copy_(x, non_blocking=True), 1, to_host, 0),
        (lambda: x.sum().item(), 1, {}, 1),
        (lambda: bool((x > 0).all()), 1, {}, 2),
        (lambda: torch.equal(x, x.clone()), 1, {}, 1),
        (lambda: x[x > 0], 2, {}, 1),  # nonzero and index
        (torch.sim.synchronize, 1, {}, 0),
        (lambda: torch.sim.current_stream().synchronize(), 1, {}, 0),
        (lambda: torch.Stream("sim").record_event().synchronize(), 1, {}, 0),
        (lambda: torch.sim.current_stream().wait_stream(torch.Stream("sim")), 0, {}, 0),
        (lambda: plain.sum().item(), 0, {}, 0),
    ):
        torch.sim.reset_counters()
        with torch.sim.wait_sites(__file__) as sites:
            do()
        found = torch.sim.counters()
        assert (found.host_waits, found.copies, found.launches) == (waits, copies, launches), do
        assert set(found.bytes.values()) <= {4, 16}
        assert [site.split(":")[0] for *_, site in sites] == [__file__] * waits, do


def test_a_mask_of_many_numbers_takes_few_launches_and_no_wait():
    x = torch.empty(4, 64, 128, 128, device="sim")
    torch.sim.reset_counters()
    with keyed(0, 0):
        F.dropout(x, 0.1)
    found = torch.sim.counters()
    assert (found.host_waits, found.copies) == (0, {"to the device": 1})
    assert found.launches <= 29
