"""Tensors of a computation kept within a limit: those needed soonest stay, the others are stored.

What autograd keeps and what a network holds is all the same here. A storage that is stored keeps
its tensors, views and versions, but has no memory; before an operation reads it or writes to it, it
gets its bytes back. PyTorch's dispatcher shows each operation, those of backward included.

Storing begins before the limit is reached, and what the next operations read is brought back while
others run. What they will read is guessed: virtual tiles take turns in a fixed order, so each needs
next what it used in its last turn, and in backward what it has stored last.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from spatialdl.comm.allocator import return_freed_memory
from spatialdl.streaming.device_store import DeviceDiskStore, PinnedStore
from spatialdl.streaming.store import DiskStore, Slot, Store
from spatialdl.streaming.watch import Watch, storages_of

SMALL = 64 * 2**10
"""Bytes of a storage that always stays."""

AHEAD = 0.1
"""Of a limit: how much of it is being stored before it must be, or brought back."""


class _Entry:
    """A storage that is watched.

    Attributes:
        slot: where its bytes are stored, too, if they are.
        among: the entries between which it stands, in the order of their use.
        tile, turn: the virtual tile that used it last, in which of its turns.
        is_away: whether it has no memory now.
        arrives: whether its bytes are on their way back.
        early: whether it was brought back before it was needed, and was not used since.
        kept: the storage itself, while its bytes are on their way.
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

    def move_to(self, others: OrderedDict[int, _Entry]) -> None:
        self.among.pop(self.key, None)
        self.among = others
        others[self.key] = self


class _Tile:
    """What a virtual tile used in its last turn, and what of its tensors is stored.

    Attributes:
        early: how many are brought back before they are needed.
    """

    def __init__(self) -> None:
        self.turn = self.early = 0
        self.used: OrderedDict[int, _Entry] = OrderedDict()
        self.away: OrderedDict[int, _Entry] = OrderedDict()


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

    def __init__(self, limit: int | None = None, store: Store | None = None) -> None:
        self.limit, self.store = limit, store
        self._entries: dict[int, _Entry] = {}
        self._tiles = [_Tile()]
        self._active = 0
        self._unused: OrderedDict[int, _Entry] = OrderedDict()  # in the last turn of their tiles
        self._leaving: OrderedDict[int, _Entry] = OrderedDict()  # stored, and still here
        self._moving: deque[_Entry] = deque()  # have a transfer, with their storages
        self.here = self.peak = 0
        self._leaving_bytes = self._early = 0
        self.told: Callable[[], object] | None = None

    def watch(self, tile: int = 0) -> AbstractContextManager[object]:
        """A context for a thread; several threads may be in it, one of them active at a time.

        Without a limit, and nobody to be told of operations, nothing is watched: a look at each
        takes the time of a small one.

        Args:
            tile: number of the virtual tile that the thread works on. They have turns in the order
                of their numbers, as far as is known here.
        """
        if self.limit is None and self.told is None:
            return nullcontext()
        return Watch(self, tile, None if self.store is None else self.store.device)

    def bring(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors their bytes back, for who reads them outside of `watch`."""
        for storage in storages_of(tensors):
            self.need(storage)

    def release(self, tensors: Iterable[Tensor]) -> None:
        """The same for who also writes to them: they are watched no longer."""
        for storage in storages_of(tensors):
            self.need(storage, writes=True)
            self.forget(storage._cdata)

    def begin(self, tile: int) -> None:
        """The turn of a virtual tile; what it did not use in the one before, nobody needs soon."""
        if tile == self._active:
            return
        self._tiles.extend(_Tile() for _ in range(tile + 1 - len(self._tiles)))
        self._active, own = tile, self._tiles[tile]
        for entry in [one for one in own.used.values() if one.turn < own.turn and not one.early]:
            entry.move_to(self._unused)
        own.turn += 1

    def need(self, storage: torch.UntypedStorage, writes: bool = False) -> None:
        """Before it is read or written to."""
        entry = self._entries.get(storage._cdata)
        if entry is None:
            return
        if entry.is_away:
            self._fetch(entry, storage)
        if writes or entry.arrives:  # what is being stored may be read
            self._wait(entry)
        self._use(entry)
        if writes:
            self._free(entry)  # it is no longer what is stored

    def note(self, storage: torch.UntypedStorage) -> None:
        """An operation has made it."""
        device = None if self.store is None else self.store.device
        if storage.nbytes() > SMALL and (device is None or storage.device.type == device.type):
            self._entries[storage._cdata] = entry = _Entry(storage, self)
            self._use(entry)
            self._has_come(entry)

    def make_room(self, needed: Iterable[torch.UntypedStorage]) -> None:
        """Store what nobody needs soon, but nothing that is needed now.

        What is needed but stored is counted as if it were in memory already.
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
        """Bring back what the next operations read, where there is room for it."""
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
        """A storage is gone."""
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
        """It is neither on its way out nor brought back early any more."""
        if entry.among is self._leaving:
            self._leaving_bytes -= entry.nbytes
        if entry.early:
            self._early -= entry.nbytes
            self._tiles[entry.tile].early -= 1
            entry.early = False

    def _start_storing(self, most: int, keep: set[int]) -> None:
        """Until no more than `most` bytes stay here."""
        if self.here - self._leaving_bytes <= most or self.store is None:
            return
        tiles, active = self._tiles, self._active
        # whose turn was last comes last again; the active one has what it needs now at its end
        others = [tiles[(active - back) % len(tiles)].used for back in range(1, len(tiles) + 1)]
        for row in (self._unused, *others):
            while row:
                entry = next(iter(row.values()))
                if entry.key in keep or self.here - self._leaving_bytes <= most:
                    break
                self._store(entry, self.store)

    def _store(self, entry: _Entry, store: Store) -> None:
        storage = entry.storage()
        if storage is None or not storage.resizable():
            self.forget(entry.key)  # the memory of somebody else
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
            raise RuntimeError("a tensor is neither in memory nor stored")
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
        """Let go of storages whose bytes are where they should be."""
        while self._moving and (self._moving[0].slot is None or self._moving[0].slot.is_done()):
            self._moving.popleft().kept = None

    def _needed_next(self) -> list[_Entry]:
        """What this virtual tile, and the next one, will read first of what is stored.

        One of each: more are stored again before their turn comes.
        """
        backward = torch._C._current_graph_task_id() >= 0
        number, found = self._active, []
        for back in (1, 0)[: len(self._tiles)]:
            tile = self._tiles[number % len(self._tiles)]
            last = next(reversed(tile.away.values()), None)
            if last is not None and not tile.early and (backward or last.turn == tile.turn - back):
                found.append(last)
            number += 1
        return found


HOST, DISK = "host", "disk"


def memory_within(
    limit_gb: object,
    where: object,
    device: torch.device,
    key: str = "limit_gb",
    where_key: str = "store",
) -> Memory:
    """What holds tensors of virtual tiles, within a limit if there is one.

    Args:
        limit_gb: 10^9 bytes; None for no limit.
        where: what is not in memory goes: ``host`` (pinned memory, for accelerators), ``disk``
            (the folder for temporary files), or a folder. None: ``host`` for an accelerator, else
            ``disk``.
        key, where_key: what the two are called where they are given.

    Raises:
        ValueError: the limit is no positive number, or the store cannot be used.
    """
    if limit_gb is None:
        if where is not None:
            raise ValueError(
                f"{where_key}={where} is of no use without {key}: set it, or leave {where_key} out"
            )
        return Memory()
    if isinstance(limit_gb, bool) or not isinstance(limit_gb, int | float) or not limit_gb > 0:
        raise ValueError(f"{key}={limit_gb} must be a number above 0")
    if device.type == "meta":
        raise ValueError(f"{key}={limit_gb}: the network is on meta, where nothing takes memory")
    limit, on_cpu = int(limit_gb * 1e9), device.type == "cpu"
    if where == HOST and on_cpu:
        raise ValueError(
            f"{where_key}={HOST} is for accelerators, this network is on a CPU: take {DISK} or a "
            "folder"
        )
    if where in (None, HOST) and not on_cpu:
        return Memory(limit, PinnedStore(device))
    folder = None if where in (None, DISK) else str(where)
    if not on_cpu:
        return Memory(limit, DeviceDiskStore(device, folder))
    return_freed_memory()
    return Memory(limit, DiskStore(folder))
