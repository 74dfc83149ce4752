"""Tensors of virtual tiles that wait in pinned memory of the host, or on a disk."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import spatialdl
from spatialdl.cli import start
from spatialdl.comm.launch import LaunchInfo
from spatialdl.data.batches import Slice
from spatialdl.data.loader import DeviceCopy, Loader
from spatialdl.pipeline.streamed import memory_of
from spatialdl.spatial.streaming.device_store import CHUNK, DeviceDiskStore, PinnedStore
from spatialdl.spatial.streaming.memory import Memory, memory_within
from spatialdl.training.peak_memory import peak_memory_mb
from tests.data.numbers import WHOLE, batching, contents, views

STORES = {"host": PinnedStore, "disk": DeviceDiskStore}
MB = 2**20 // 4  # numbers


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> PinnedStore | DeviceDiskStore:
    return STORES[request.param](torch.device("sim"))


def test_what_is_longer_than_a_piece_of_pinned_memory(monkeypatch):
    monkeypatch.setattr("spatialdl.spatial.streaming.device_store.CHUNK", 2**16)
    store, whole = PinnedStore(torch.device("sim")), torch.arange(3 * 2**14, device="sim")
    first = store.put(torch.zeros(1000, device="sim").untyped_storage())
    slot = store.put(whole.untyped_storage())
    assert slot.start == first.size
    slot.wait()
    values = whole.cpu()
    whole.zero_()
    store.get(slot, whole.untyped_storage())
    slot.wait()
    assert torch.equal(whole.cpu(), values)
    assert CHUNK > 2**16


def test_pinned_memory_is_stored_without_a_wait_of_the_host():
    store, whole = PinnedStore(torch.device("sim")), torch.ones(1000, device="sim")
    with torch.sim.held():
        slot = store.put(whole.untyped_storage())
        assert not slot.is_done()
        slot.wait()
    torch.sim.synchronize()
    assert slot.is_done()


def test_operations_on_what_was_stored(store, delays):
    kept = Memory(4 * 2**20, store)
    with kept.watch():
        made = [torch.full((MB,), float(number), device="sim") for number in range(12)]
        for _ in range(3):
            for one in made:
                one.add_(1)
        assert kept.here <= 4 * 2**20
        totals = torch.stack([one.mean() for one in made])
    assert totals.tolist() == [number + 3 for number in range(12)]
    assert store.read > 12 * 2**20


@pytest.mark.parametrize("where", STORES)
def test_a_streamed_network_is_that_of_one_process(where, delays, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)
    ).double()
    ours, x = copy.deepcopy(model).to("sim"), torch.randn(1, 3, 101, 90, dtype=torch.float64)
    for _ in range(2):
        expected = model(x)
        expected.square().mean().backward()
        y = spatialdl.stream(
            ours, x.to("sim"), (3, 2), limit_gb=3e-4, store="host" if where == "host" else tmp_path
        )
        memory = memory_of(y)
        y.square().mean().backward()
        torch.testing.assert_close(y.cpu(), expected, rtol=0, atol=1e-12)
    for own, one in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), one.grad, rtol=0, atol=1e-12)
    for own, one in zip(ours.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(own.cpu(), one, rtol=0, atol=1e-12)
    assert memory.store.written > 1e6
    del y, memory
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_tiles_run_on_the_stream_of_the_caller():
    """They ran on the default stream, and read images that were not computed yet."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
    image = torch.randn(1, 3, 33, 40)
    expected = model(image * 3)
    on_device = copy.deepcopy(model).to("sim")
    x = image.to("sim")
    torch.accelerator.synchronize()
    torch.sim.set_delay(2000, seed=3)
    try:
        side = torch.Stream("sim")
        with side:
            for _ in range(3):
                x = x * 3 ** (1 / 3)
            y = spatialdl.stream(on_device, x, grid=(2, 2))
            expected.sum().backward()
            y.sum().backward()
            found = y.detach().cpu()
            grads = [one.grad.cpu() for one in on_device.parameters()]
    finally:
        torch.sim.set_delay(0)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)
    for ours, plain in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain.grad, rtol=1e-4, atol=1e-3)


def test_where_tensors_of_a_device_wait(tmp_path):
    assert isinstance(memory_within(1, None, torch.device("sim")).store, PinnedStore)
    assert isinstance(memory_within(1, "host", torch.device("sim")).store, PinnedStore)
    assert isinstance(memory_within(1, "disk", torch.device("sim")).store, DeviceDiskStore)
    found = memory_within(1, str(tmp_path), torch.device("sim")).store
    assert isinstance(found, DeviceDiskStore)
    assert found.folder == tmp_path
    with pytest.raises(ValueError, match=r"cannot store tensors in .*missing: No such file"):
        memory_within(1, str(tmp_path / "missing"), torch.device("sim"))
    assert 0 < PinnedStore(torch.device("sim")).room < 2**50


def test_another_stream_reads_what_comes_back(store, delays):
    """Only that stream waited for it, and the one that computes read it too early."""
    kept, side = Memory(4 * 2**20, store), torch.Stream("sim")
    with kept.watch():
        made = [torch.full((MB,), float(number), device="sim") for number in range(12)]
        for number, one in enumerate(made):
            with side:
                copied = one + 1
            again = one * 3
            torch.accelerator.current_stream().wait_stream(side)
            assert copied.untyped_storage()._cdata not in kept._entries
            assert (copied == number + 1).all()
            assert (again == 3 * number).all()


def test_pinned_memory_is_not_watched(store):
    kept = Memory(2**20, store)
    with kept.watch():
        pinned = torch.ones(4 * MB, pin_memory=True)
        there = torch.ones(MB, device="sim")
    assert kept.here == there.nbytes
    assert len(pinned) == 4 * MB


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_while_others_are_computed_with(workers, delays):
    device = torch.device("sim", 0)
    cut = batching(2, 2, mask_box=WHOLE)
    expected = contents(Loader(views(9), cut, 0).batches())
    loader = Loader(views(9), cut, 0, workers=workers, device=device)
    found = []
    for batch in loader.batches():
        assert all(x.device == device for one in batch for x in one.tensors())
        found.append([one.map(lambda x: x + 0) for one in batch])
        del batch  # its memory may be taken again by the next copy
    loader.close()
    assert contents([[one.map(torch.Tensor.cpu) for one in batch] for batch in found]) == expected


def test_a_device_copies_beside_what_it_computes():
    copy = DeviceCopy(torch.device("sim", 0))
    with torch.sim.held() as computing:
        arrived = copy.begin([Slice(torch.tensor([3]), 1.0, None)])
        assert copy._stream is not None
        copy._stream.synchronize()  # it has not waited for the computing
        computing.set()
        assert arrived()[0].labels.tolist() == [3]


def test_the_peak_is_that_of_the_device():
    device = torch.device("sim", 0)
    torch.sim.reset_peak_memory_stats(device)
    before = peak_memory_mb(device)
    block = torch.empty(2**22, device=device)
    assert peak_memory_mb(device) >= before + 16
    del block


CONFIG = {"device": "auto", "comm": {"ranks_per_device": 1, "timeout": None, "transport": "mpi"}}


def allocations(index: int) -> int:
    """Since the device was made: without any, CUDA has no context."""
    return int(torch.accelerator.memory.memory_stats(index)["allocation.all.allocated"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_has_a_context_before_mpi_starts(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rank 0 too, whose device is the current one from the beginning."""
    info, before = LaunchInfo(rank, 2, rank, "mpiexec"), allocations(rank)
    monkeypatch.setattr(start.run_log, "start_log", lambda rank: None)
    monkeypatch.setattr(start, "limit_waits", lambda seconds: None)

    def start_world(transport: str) -> None:
        assert torch.accelerator.current_device_index() == rank
        assert allocations(rank) > before
        raise InterruptedError

    monkeypatch.setattr(start, "start_world", start_world)
    with pytest.raises(InterruptedError):
        start.join_ranks(info, OmegaConf.create(CONFIG), lambda config: pytest.fail("too far"))
