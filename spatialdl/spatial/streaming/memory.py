"""Keeps tensors within a memory limit: those needed soonest stay, the rest is offloaded.

Tensors saved by autograd and tensors of the network are treated alike. An offloaded storage keeps
its tensors, views and versions, but has no memory. Its bytes are loaded before an operation reads
or writes it. PyTorch's dispatcher shows each operation, including those of backward.

Offloading starts before the limit is reached, and inputs of the next operations are prefetched
while other operations run. The prefetch is a guess: virtual tiles take turns in a fixed order, so
each needs next what it used in its last turn, and in backward what it stored last.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from spatialdl.comm.allocator import return_freed_memory
from spatialdl.spatial.streaming.device_store import DeviceDiskStore, PinnedStore
from spatialdl.spatial.streaming.store import DiskStore, Slot, Store
from spatialdl.spatial.streaming.watch import Watch, storages_of
from spatialdl.torch_internals import current_graph_task_id

SMALL = 64 * 2**10
"""Storages up to this number of bytes are never offloaded."""

AHEAD = 0.1
"""Fraction of the limit that is offloaded ahead of need, and that may be prefetched."""


class _Entry:
    """A watched storage.

    Attributes:
        slot: where its bytes are stored, if they are.
        among: the queue that it is in, ordered by use.
        tile, turn: the virtual tile that used it last, and that tile's turn.
        is_away: whether it has no memory now.
        arrives: whether its bytes are being loaded.
        early: whether it was prefetched and not used since.
        kept: the storage itself, during a transfer.
    """

    def __init__(self, storage: torch.UntypedStorage, memory: Memory) -> None:
        self.key, self.nbytes = storage._cdata, storage.nbytes()
        self.slot: Slot | None = None
        self.among: OrderedDict[int, _Entry] = OrderedDict()
        self.tile = self.turn = 0
        self.is_away = self.arrives = self.early = False
        self.kept: torch.UntypedStorage | None = None
        key = self.key
        # the Python object of a storage lives as long as the storage itself
        self.storage = weakref.ref(storage, lambda _: memory.forget(key))

    def move_to(self, queue: OrderedDict[int, _Entry]) -> None:
        self.among.pop(self.key, None)
        self.among = queue
        queue[self.key] = self


class _Tile:
    """Storages that a virtual tile used in its last turn, and its offloaded ones.

    Attributes:
        early: number of prefetched storages.
    """

    def __init__(self) -> None:
        self.turn = self.early = 0
        self.used: OrderedDict[int, _Entry] = OrderedDict()
        self.away: OrderedDict[int, _Entry] = OrderedDict()


class Memory:
    """Keeps tensors that are allocated within `watch` within a limit.

    Args:
        limit: bytes of these tensors in memory; inputs and outputs of one operation are in memory
            together, regardless of the limit. None for no limit.
        store: for offloaded tensors; None without a limit.

    Attributes:
        limit: as given.
        store: as given.
        here: bytes in memory now.
        peak: maximum bytes in memory so far.
        on_operation: callback before each operation within `watch`, if set.
    """

    def __init__(self, limit: int | None = None, store: Store | None = None) -> None:
        self.limit, self.store = limit, store
        self._entries: dict[int, _Entry] = {}
        self._tiles = [_Tile()]
        self._active = 0
        self._unused: OrderedDict[int, _Entry] = OrderedDict()  # not in the last turn of their tile
        self._leaving: OrderedDict[int, _Entry] = OrderedDict()  # stored, and still in memory
        self._moving: deque[_Entry] = deque()  # entries whose transfer holds their storage
        self.here = self.peak = 0
        self._leaving_bytes = self._early = 0
        self.on_operation: Callable[[], object] | None = None

    def watch(self, tile: int = 0) -> AbstractContextManager[object]:
        """Context for a thread; several threads may be in it, one of them active at a time.

        Without a limit and a callback nothing is watched, as watching an operation costs as much
        as a small one.

        Args:
            tile: number of the virtual tile of the thread. The prefetch assumes turns in the order
                of these numbers.
        """
        if self.limit is None and self.on_operation is None:
            return nullcontext()
        return Watch(self, tile, None if self.store is None else self.store.device)

    def bring(self, tensors: Iterable[Tensor]) -> None:
        """Load the bytes of tensors that are read outside of `watch`."""
        for storage in storages_of(tensors):
            self.need(storage)

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Load tensors for reads and writes outside of `watch`, and stop watching them."""
        for storage in storages_of(tensors):
            self.need(storage, writes=True)
            self.forget(storage._cdata)

    def begin(self, tile: int) -> None:
        """Begin a tile's turn; storages unused in its previous turn are stored first."""
        if tile == self._active:
            return
        self._tiles.extend(_Tile() for _ in range(tile + 1 - len(self._tiles)))
        self._active, own = tile, self._tiles[tile]
        for entry in [
            used for used in own.used.values() if used.turn < own.turn and not used.early
        ]:
            entry.move_to(self._unused)
        own.turn += 1

    def need(self, storage: torch.UntypedStorage, writes: bool = False) -> None:
        """Prepare a storage for a read or write."""
        entry = self._entries.get(storage._cdata)
        if entry is None:
            return
        if entry.is_away:
            self._fetch(entry, storage)
        if writes or entry.arrives:  # reads may overlap with storing
            self._wait(entry)
        self._use(entry)
        if writes:
            self._free(entry)  # the stored bytes are outdated

    def note(self, storage: torch.UntypedStorage) -> None:
        """Watch a storage that an operation has allocated."""
        device = None if self.store is None else self.store.device
        if storage.nbytes() > SMALL and (device is None or storage.device.type == device.type):
            self._entries[storage._cdata] = entry = _Entry(storage, self)
            self._use(entry)
            self._has_come(entry)

    def make_room(self, needed: Iterable[torch.UntypedStorage]) -> None:
        """Offload storages that are not needed soon, except those needed now.

        Offloaded storages that are needed count as if they were in memory.
        """
        if self.limit is None:
            return
        self._settle()
        room, keep = self.limit, set()
        for storage in needed:
            entry = self._entries.get(storage._cdata)
            if entry is not None:
                keep.add(entry.key)
                if entry.is_away:
                    room -= entry.nbytes
                else:
                    self._use(entry)
        self._start_storing(room - int(AHEAD * self.limit), keep)
        while self.here > room and self._leaving:
            self._put_away(next(iter(self._leaving.values())))

    def look_ahead(self) -> None:
        """Prefetch inputs of the next operations where there is room."""
        if self.limit is None:
            return
        most = int(AHEAD * self.limit)
        for entry in self._needed_next():
            while self.here + entry.nbytes > self.limit and self._leaving:
                first = next(iter(self._leaving.values()))
                if first.slot is None or not first.slot.is_done():
                    break
                self._put_away(first)
            if self._early + entry.nbytes > most or self.here + entry.nbytes > self.limit:
                break
            storage = entry.storage()
            if storage is not None:
                self._fetch(entry, storage)
                tile = self._tiles[entry.tile]
                entry.turn, entry.early = tile.turn, True
                entry.move_to(tile.used)
                tile.early += 1
                self._early += entry.nbytes

    def forget(self, key: int) -> None:
        """Stop watching a freed storage."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            if not entry.is_away:
                self.here -= entry.nbytes
            self._leave(entry)
            entry.among.pop(key, None)
            self._free(entry)

    # --- between memory and store

    def _use(self, entry: _Entry) -> None:
        own = self._tiles[self._active]
        self._leave(entry)
        entry.tile, entry.turn = self._active, own.turn
        entry.move_to(own.used)

    def _leave(self, entry: _Entry) -> None:
        """Cancel that an entry is leaving, or counts as prefetched."""
        if entry.among is self._leaving:
            self._leaving_bytes -= entry.nbytes
        if entry.early:
            self._early -= entry.nbytes
            self._tiles[entry.tile].early -= 1
            entry.early = False

    def _start_storing(self, most: int, keep: set[int]) -> None:
        """Start to store until at most `most` bytes are not leaving."""
        if self.here - self._leaving_bytes <= most or self.store is None:
            return
        tiles, active = self._tiles, self._active
        # the previous tile's turn comes last; the active tile's current needs are at its end
        queues = [tiles[(active - back) % len(tiles)].used for back in range(1, len(tiles) + 1)]
        for queue in (self._unused, *queues):
            while queue:
                entry = next(iter(queue.values()))
                if entry.key in keep or self.here - self._leaving_bytes <= most:
                    break
                self._store(entry, self.store)

    def _store(self, entry: _Entry, store: Store) -> None:
        storage = entry.storage()
        if storage is None or not storage.resizable():
            self.forget(entry.key)  # memory that PyTorch does not own
            return
        if entry.slot is None:
            entry.slot = store.put(storage)
            self._moves(entry, storage)
        self._leave(entry)
        entry.move_to(self._leaving)
        self._leaving_bytes += entry.nbytes

    def _put_away(self, entry: _Entry) -> None:
        self._wait(entry)
        storage = entry.storage()
        if storage is None:
            self.forget(entry.key)
            return
        storage.resize_(0)
        self._leave(entry)
        entry.is_away = True
        entry.move_to(self._tiles[entry.tile].away)
        self.here -= entry.nbytes

    def _fetch(self, entry: _Entry, storage: torch.UntypedStorage) -> None:
        if self.store is None or entry.slot is None:
            raise RuntimeError("internal error: a tensor is neither in memory nor stored")
        storage.resize_(entry.nbytes)
        self.store.get(entry.slot, storage)
        entry.is_away, entry.arrives = False, True
        self._moves(entry, storage)
        self._has_come(entry)

    def _has_come(self, entry: _Entry) -> None:
        self.here += entry.nbytes
        self.peak = max(self.peak, self.here)

    def _moves(self, entry: _Entry, storage: torch.UntypedStorage) -> None:
        entry.kept = storage
        self._moving.append(entry)

    def _wait(self, entry: _Entry) -> None:
        entry.arrives = False
        if entry.slot is not None:
            try:
                entry.slot.wait()
            except BaseException:
                self._free(entry)
                raise

    def _free(self, entry: _Entry) -> None:
        slot, entry.slot = entry.slot, None
        if slot is not None and self.store is not None:
            self.store.free(slot)

    def _settle(self) -> None:
        """Release storages whose transfers are done."""
        while self._moving and (self._moving[0].slot is None or self._moving[0].slot.is_done()):
            self._moving.popleft().kept = None

    def _needed_next(self) -> list[_Entry]:
        """The first offloaded storages that this virtual tile and the next one will read.

        One for each: more would be offloaded again before their turn.
        """
        backward = current_graph_task_id() >= 0
        number, entries = self._active, []
        for back in (1, 0)[: len(self._tiles)]:
            tile = self._tiles[number % len(self._tiles)]
            last = next(reversed(tile.away.values()), None)
            if last is not None and not tile.early and (backward or last.turn == tile.turn - back):
                entries.append(last)
            number += 1
        return entries


HOST, DISK = "host", "disk"


def limit_bytes(limit_gb: object, where: object, key: str, where_key: str) -> int | None:
    """Check a memory limit; arguments and errors are those of `memory_within`."""
    if limit_gb is None:
        if where is not None:
            raise ValueError(
                f"{where_key}={where} has no effect without {key}: set it, or leave {where_key} out"
            )
        return None
    if isinstance(limit_gb, bool) or not isinstance(limit_gb, int | float) or not limit_gb > 0:
        raise ValueError(f"{key}={limit_gb} must be a number above 0")
    return int(limit_gb * 1e9)


def memory_within(
    limit_gb: object,
    where: object,
    device: torch.device,
    key: str = "limit_gb",
    where_key: str = "store",
) -> Memory:
    """Make the memory for tensors of virtual tiles, within a limit if there is one.

    Args:
        limit_gb: 10^9 bytes; None for no limit.
        where: destination of offloaded tensors: ``host`` (pinned memory, for accelerators),
            ``disk`` (the folder for temporary files), or a folder. None for ``host`` on
            accelerators, else ``disk``.
        key, where_key: names of the two for messages.

    Raises:
        ValueError: if the limit is not a positive number, or the store cannot be used.
    """
    limit, on_cpu = limit_bytes(limit_gb, where, key, where_key), device.type == "cpu"
    if limit is None:
        return Memory()
    if device.type == "meta":
        raise ValueError(f"{key}={limit_gb}: the network is on meta, where tensors have no memory")
    if where == HOST and on_cpu:
        raise ValueError(
            f"{where_key}={HOST} is for accelerators, but the network is on a CPU: take {DISK} or "
            "a folder"
        )
    if where in (None, HOST) and not on_cpu:
        return Memory(limit, PinnedStore(device))
    folder = None if where in (None, DISK) else str(where)
    if not on_cpu:
        return Memory(limit, DeviceDiskStore(device, folder))
    return_freed_memory()
    return Memory(limit, DiskStore(folder))
