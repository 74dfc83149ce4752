"""Device memory: what is freed is not what it was, and copies run in streams."""

from __future__ import annotations

import pytest
import torch


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


def test_a_recorded_stream_keeps_memory():
    side = torch.Stream("sim")
    x = torch.ones(1000, device="sim")
    address = x.data_ptr()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.held(side):
        with side:
            y = x + 1
        x.record_stream(side)
        del x
        assert torch.empty(1000, device="sim").data_ptr() != address
        torch.sim.current_stream().synchronize()
    side.synchronize()
    assert (y == 2).all()
    assert torch.empty(1000, device="sim").data_ptr() == address


def test_memory_is_counted():
    torch.sim.empty_cache()
    before = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    x = torch.empty(2**20, device="sim")
    assert torch.sim.memory_allocated() - before == 2**22
    del x
    assert torch.sim.memory_allocated() == before
    assert torch.sim.max_memory_allocated() - before == 2**22
    reserved = torch.sim.memory_reserved()
    torch.sim.empty_cache()
    assert reserved - torch.sim.memory_reserved() >= 2**22
    free, total = torch.sim.mem_get_info()
    assert total == 16 * 2**30
    assert free == total - torch.sim.memory_reserved()


def test_kinds_of_addresses():
    pinned = torch.ones(4).pin_memory()
    assert torch.sim.pointer_kind(torch.ones(4, device="sim")[1:].data_ptr()) == "device 0"
    assert torch.sim.pointer_kind(pinned[1:].data_ptr()) == "pinned host"
    assert torch.sim.pointer_kind(torch.ones(4).data_ptr()) == "other"


def test_a_pageable_source_may_change_at_once():
    x = torch.ones(3)
    with torch.sim.held():
        there = x.to("sim", non_blocking=True)
        x.zero_()
    assert there.tolist() == [1, 1, 1]


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


def test_pinned_memory_in_use_is_kept():
    x = torch.arange(1000.0).pin_memory()
    with torch.sim.held():
        there = x.to("sim", non_blocking=True)
        del x
        torch.full((1000,), -1.0).pin_memory()
    assert torch.equal(there.cpu(), torch.arange(1000.0))


def test_a_pinned_source_that_is_rearranged_is_staged():
    x = torch.ones(3, 8).pin_memory()
    with torch.sim.held():
        there = x[:, ::2].to("sim", non_blocking=True)
        wide = x.to("sim", torch.float64, non_blocking=True)
        x.zero_()
    assert (there == 1).all()
    assert (wide == 1).all()


def test_devices_wait_for_each_other():
    x = torch.zeros(3, device="sim:0")
    with torch.sim.held(torch.sim.current_stream(0)):
        x.add_(1)
        y = x.to("sim:1") + 1
        assert not torch.sim.current_stream(1).query()
    assert y.tolist() == [2, 2, 2]


def test_two_devices_in_one_operator_are_refused():
    here, there = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        here + there
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        here + torch.ones(3)
    assert (here + torch.tensor(1.0)).tolist() == [2, 2, 2]


def test_storages():
    x = torch.arange(6.0, device="sim")
    storage = x.untyped_storage()
    assert torch.equal(
        torch.tensor([], device="sim").set_(storage, 2, (2, 2), (2, 1)), x[2:].view(2, 2)
    )
    y = torch.empty(0, device="sim")
    y.resize_(3).fill_(2)
    y.resize_(5)
    assert y[:3].tolist() == [2, 2, 2]
    assert y[3:].isnan().all()
    assert storage.cpu().nbytes() == 24
