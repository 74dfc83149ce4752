"""Tensors of a computation kept within a limit: those used last stay, the others are stored.

What autograd keeps and what a network holds is all the same here. A storage that is stored keeps
its tensors, views and versions, but has no memory; before an operation reads it or writes to it, it
gets its bytes back. PyTorch's dispatcher shows each operation, those of backward included.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spatialdl.comm.allocator import return_what_is_freed
from spatialdl.streaming.store import DiskStore, Slot

SMALL = 64 * 2**10
"""Bytes of a storage that always stays."""


class _Entry:
    """A storage that is watched, and where it is stored."""

    def __init__(self, storage: torch.UntypedStorage, memory: Memory) -> None:
        self.nbytes = storage.nbytes()
        self.slot: Slot | None = None
        key = storage._cdata
        # the Python object of a storage lives as long as the storage itself
        self.storage = weakref.ref(storage, lambda _: memory.forget(key))


class Memory:
    """Keeps the tensors that are made within `watch` within a limit.

    Args:
        limit: bytes of these tensors that may be in memory; what one operation reads and makes is
            there together, limit or not. None for no limit.
        store: where the others go; None without a limit.

    Attributes:
        limit: as given.
        store: where the others are.
        here: bytes in memory now.
        peak: bytes in memory at most, so far.
        told: called after each operation within `watch`, if there is something.
    """

    def __init__(self, limit: int | None = None, store: DiskStore | None = None) -> None:
        self.limit, self.store = limit, store
        self._here: OrderedDict[int, _Entry] = OrderedDict()  # used last at the end
        self._away: dict[int, _Entry] = {}
        self.here = self.peak = 0
        self.told: Callable[[], object] | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A context for a thread; several threads may be in it, one of them active at a time."""
        with _Watch(self):
            yield

    def bring(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors their bytes back, for who reads them outside of `watch`."""
        for tensor in tensors:
            with torch._C.DisableTorchFunction():  # it is no operation of the network
                storage = tensor.untyped_storage()
            self.need(storage)

    def need(self, storage: torch.UntypedStorage, writes: bool = False) -> None:
        """Before it is read or written to."""
        key = storage._cdata
        entry = self._away.get(key)
        if entry is not None:
            self._fetch(key, entry, storage)
        else:
            entry = self._here.get(key)
            if entry is None:
                return
            self._here.move_to_end(key)
        if writes and entry.slot is not None and self.store is not None:
            self.store.free(entry.slot)  # it is no longer what is stored
            entry.slot = None

    def note(self, storage: torch.UntypedStorage) -> None:
        """An operation has made it."""
        nbytes = storage.nbytes()
        if nbytes > SMALL:
            self._here[storage._cdata] = _Entry(storage, self)
            self.here += nbytes
            self.peak = max(self.peak, self.here)

    def make_room(self, needed: Iterable[torch.UntypedStorage]) -> None:
        """Store what was not used for the longest time, but nothing that is needed now.

        What is needed but stored is counted as if it were in memory already.
        """
        if self.limit is None:
            return
        keep = {storage._cdata for storage in needed}
        room = self.limit - sum(self._away[key].nbytes for key in keep & self._away.keys())
        if self.here <= room:
            return
        for key in [key for key in self._here if key not in keep]:
            if self.here <= room:
                break
            self._put_away(key)

    def forget(self, key: int) -> None:
        """A storage is gone."""
        entry = self._here.pop(key, None)
        if entry is not None:
            self.here -= entry.nbytes
        else:
            entry = self._away.pop(key, None)
        if entry is not None and entry.slot is not None and self.store is not None:
            self.store.free(entry.slot)

    def _put_away(self, key: int) -> None:
        entry = self._here[key]
        storage = entry.storage()
        if storage is None or not storage.resizable() or self.store is None:
            return
        if entry.slot is None:
            entry.slot = self.store.put(storage)
        storage.resize_(0)
        self._away[key] = self._here.pop(key)
        self.here -= entry.nbytes

    def _fetch(self, key: int, entry: _Entry, storage: torch.UntypedStorage) -> None:
        store, slot = self.store, entry.slot
        if store is None or slot is None:
            raise RuntimeError("a tensor is neither in memory nor stored")
        storage.resize_(entry.nbytes)
        store.get(slot, storage)
        self._here[key] = self._away.pop(key)
        self.here += entry.nbytes
        self.peak = max(self.peak, self.here)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a `Memory` the operations of one thread."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented  # what it does with its tiles comes here
        kwargs, memory = kwargs or {}, self._memory
        if memory.told is not None:
            memory.told()
        given: dict[int, torch.UntypedStorage] = {}
        _collect(args, given)
        _collect(kwargs.values(), given)
        written = _written(func, args, kwargs) if func._schema.is_mutable else ()
        memory.make_room(given.values())
        for key, storage in given.items():
            memory.need(storage, key in written)
        result = func(*args, **kwargs)
        made: dict[int, torch.UntypedStorage] = {}
        _collect((result,), made)
        for key, storage in made.items():
            if key not in given:
                memory.note(storage)
        memory.make_room((*given.values(), *made.values()))
        return result


def _collect(values: Iterable[Any], found: dict[int, torch.UntypedStorage]) -> None:
    """The storages of the tensors among `values`, and in their lists, by address."""
    for value in values:
        if isinstance(value, Tensor):
            if value.device.type != "meta":
                storage = value.untyped_storage()
                found[storage._cdata] = storage
        elif isinstance(value, list | tuple):
            _collect(value, found)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """The storages that an operation writes to, by address."""
    found: dict[int, torch.UntypedStorage] = {}
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            _collect((value,), found)
    return set(found)


def memory_within(
    limit_gb: object,
    folder: object,
    device: torch.device,
    key: str = "limit_gb",
    folder_key: str = "store",
) -> Memory:
    """What holds tensors of virtual tiles, within a limit if there is one.

    Args:
        limit_gb: 10^9 bytes; None for no limit.
        folder: for what is not in memory; None for that for temporary files.
        key, folder_key: what the two are called where they are given.

    Raises:
        ValueError: the limit is no positive number, or the store cannot be used.
    """
    if limit_gb is None:
        if folder is not None:
            raise ValueError(
                f"{folder_key}={folder} is of no use without {key}: set it, or leave {folder_key} "
                "out"
            )
        return Memory()
    if isinstance(limit_gb, bool) or not isinstance(limit_gb, int | float) or not limit_gb > 0:
        raise ValueError(f"{key}={limit_gb} must be a number above 0")
    if device.type != "cpu":
        raise ValueError(
            f"{key}={limit_gb} is for networks on a CPU, this one is on {device}: leave it out"
        )
    return_what_is_freed()
    return Memory(int(limit_gb * 1e9), DiskStore(None if folder is None else str(folder)))
