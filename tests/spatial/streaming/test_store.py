from __future__ import annotations

import contextlib
import gc
import os
import resource
import warnings
from collections.abc import Iterator

import pytest
import torch

from spatialdl.spatial.streaming.store import DiskStore, Slot


def storage(size: int, seed: int = 0) -> torch.UntypedStorage:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)).untyped_storage()


def stored(store: DiskStore, values: torch.UntypedStorage) -> Slot:
    slot = store.put(values)
    slot.wait()
    return slot


def test_bytes_come_back(tmp_path):
    store = DiskStore(tmp_path)
    first, second = storage(5000), storage(3, 1)
    slots = [stored(store, first), stored(store, second)]
    for slot, one in zip(slots, (first, second), strict=True):
        room = torch.UntypedStorage(one.nbytes())
        store.get(slot, room)
        slot.wait()
        assert room.tolist() == one.tolist()
    assert store.written == store.read == 20_012
    assert not list(tmp_path.iterdir())  # it has no name: a killed process leaves nothing


def test_free_places_beside_each_other_become_one(tmp_path):
    store = DiskStore(tmp_path)
    first, second, third, last = (stored(store, storage(2048, seed)) for seed in range(4))
    for slot in (third, first, second):
        store.free(slot)
    small = stored(store, storage(1024, 4))
    large = stored(store, storage(4096, 5))  # what is left of three
    assert (small.start, large.start, store.peak) == (0, 4096, 4 * 8192)
    store.free(last)
    longer = stored(store, storage(5120, 6))  # the last one and 8192 more
    assert (longer.start, store.peak) == (20480, 40960)
    for slot, seed, count in ((small, 4, 1024), (large, 5, 4096), (longer, 6, 5120)):
        room = torch.UntypedStorage(4 * count)
        store.get(slot, room)
        slot.wait()
        assert room.tolist() == storage(count, seed).tolist()


def test_a_folder_that_cannot_be_written_to(tmp_path):
    with pytest.raises(ValueError, match=r"cannot store tensors in .*missing: No such file"):
        DiskStore(tmp_path / "missing")


def descriptors() -> Iterator[os.stat_result]:
    """What this process has open."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one with which they were listed
            yield os.fstat(int(name))


def test_a_store_that_is_dropped_closes_its_file(tmp_path):
    """Nobody closes the store of `spatialdl.stream`, which may be part of a cycle: it warned of an
    unclosed file whenever garbage was collected."""
    store = DiskStore(tmp_path)
    stored(store, storage(5000))
    file = os.fstat(store._file.fileno())
    cycle = [store]
    cycle.append(cycle)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del store, cycle
        gc.collect(1)  # what was made a moment ago
    assert not warned
    assert not any(os.path.samestat(opened, file) for opened in descriptors())


def test_a_limit_on_files_is_told(tmp_path):
    """A true error of the system, half way through."""
    store = DiskStore(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*tensors are stored"):
            store.put(storage(5000)).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
