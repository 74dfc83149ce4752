"""Copies between the host, pinned memory and devices."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from tests.simulated_device.holding import held


def test_there_and_back():
    x = torch.randn(3, 4, 5)
    for view in (x, x.transpose(0, 2), x[1:, ::2], x.expand(2, 3, 4, 5)):
        there = view.to("sim")
        assert torch.equal(there.cpu(), view)
        assert torch.equal(there.to("sim:1").cpu(), view)


def test_types_and_layouts_change_on_the_way():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    there = x.to("sim", torch.float64)
    assert there.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(there.cpu(), x.double())
    target = torch.empty(2, 3, 4, 5, device="sim", dtype=torch.float16)
    target.copy_(x)
    assert torch.equal(target.cpu(), x.half())
    target.copy_(torch.ones(5))
    assert (target == 1).all()


def test_a_pageable_source_may_change_at_once():
    x = torch.ones(3)
    with held():
        there = x.to("sim", non_blocking=True)
        x.zero_()
    assert there.tolist() == [1, 1, 1]


def test_a_pinned_source_is_read_later():
    x = torch.ones(3).pin_memory()
    with held():
        there = x.to("sim", non_blocking=True)
        x.zero_()
    assert there.tolist() == [0, 0, 0]


def test_a_pinned_target_is_written_later():
    x = torch.ones(3, device="sim")
    landing = torch.zeros(3).pin_memory()
    event = torch.Event("sim")
    with held():
        landing.copy_(x, non_blocking=True)
        event.record()
        assert landing.tolist() == [0, 0, 0]
    event.synchronize()
    assert landing.tolist() == [1, 1, 1]


def test_a_tensor_on_its_way_to_the_host_is_pinned():
    landing = torch.ones(3, device="sim").to("cpu", non_blocking=True)
    torch.sim.synchronize()
    assert landing.is_pinned()
    assert landing.tolist() == [1, 1, 1]


def test_pinned_memory_in_use_is_kept():
    x = torch.arange(1000.0).pin_memory()
    with held():
        there = x.to("sim", non_blocking=True)
        del x
        torch.full((1000,), -1.0).pin_memory()
    assert torch.equal(there.cpu(), torch.arange(1000.0))


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_wait_as_on_a_gpu(non_blocking):
    x = torch.ones(3, device="sim")
    landing, pinned = torch.zeros(3), torch.zeros(3).pin_memory()
    torch.sim.synchronize()
    torch.sim.reset_counters()
    landing.copy_(x, non_blocking=non_blocking)
    pinned.copy_(x, non_blocking=non_blocking)
    x.copy_(landing, non_blocking=non_blocking)
    waits = torch.sim.counters().waits
    assert waits[("copy to the host", "")] == (1 if non_blocking else 2)
    assert waits.get(("copy to the device", ""), 0) == (0 if non_blocking else 1)
    assert torch.sim.counters().copies == {"to the host": 2, "to the device": 1}
    assert torch.sim.counters().bytes == {"to the host": 24, "to the device": 12}


def test_a_pinned_target_of_a_view_is_written_later():
    x = torch.ones(4, 3, device="sim", dtype=torch.float64)
    landing, scattered = torch.zeros(3, 4).pin_memory(), torch.zeros(3, 8).pin_memory()[:, ::2]
    torch.sim.synchronize()
    torch.sim.reset_counters()
    landing.copy_(x.T, non_blocking=True)
    assert torch.sim.counters().waits == {}
    scattered.copy_(x.T, non_blocking=True)
    assert torch.sim.counters().host_waits == 1
    assert torch.equal(landing, scattered)


def test_a_pinned_source_that_is_rearranged_is_staged():
    x = torch.ones(3, 8).pin_memory()
    with held():
        there = x[:, ::2].to("sim", non_blocking=True)
        wide = x.to("sim", torch.float64, non_blocking=True)
        x.zero_()
    assert (there == 1).all()
    assert (wide == 1).all()


def test_devices_wait_for_each_other():
    x = torch.zeros(3, device="sim:0")
    with held(torch.sim.current_stream(0)):
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


def test_a_loader_pins_what_it_yields():
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    batches = list(torch.utils.data.DataLoader(data, 4, pin_memory=True))
    assert all(x.is_pinned() for (x,) in batches)
    there = [x.to("sim", non_blocking=True) for (x,) in batches]
    assert torch.cat(there).tolist() == list(range(8))


def test_saved_and_pickled():
    module = torch.nn.Linear(3, 2).to("sim")
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    back = torch.load(file)
    assert back["weight"].device == torch.device("sim:0")
    assert torch.equal(back["weight"], module.weight)
    file.seek(0)
    assert torch.load(file, map_location="cpu")["bias"].device.type == "cpu"
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.weight.device == torch.device("sim:0")
        assert torch.equal(twin.weight, module.weight)


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
