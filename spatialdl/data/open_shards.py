"""The open shards of a process and its cache of chunk maps."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import h5py

from spatialdl.data.chunk_map import ChunkMap, Where, map_chunks, own_dataset
from spatialdl.data.chunk_reading import ByteCache, Pixels, read_coded, read_raw
from spatialdl.data.codec import Codec
from spatialdl.data.format import sha256_of
from spatialdl.data.samples import ShardInfo
from spatialdl.data.staging.cache import local_name
from spatialdl.data.staging.copying import reading_source
from spatialdl.errors import ShardError

log = logging.getLogger("spatialdl.data")

_DESCRIPTORS = 64
_OPEN_SHARDS = _DESCRIPTORS // 2  # one each for the file and HDF5
_LOOK_EVERY_S = 1.0  # interval between checks for a staged copy of an open shard

Identity = tuple[int, ...]
"""(Device, inode, bytes, mtime in ns), which identify one state of a file."""


ChunkMaps = ByteCache[ChunkMap]
"""Chunk maps by the state of a file and the name of a dataset; they outlive open files."""


class OpenShard:
    """An open shard; closed when its last reference is dropped.

    Attributes:
        identity: identity of the opened file.
        is_local: whether it is a copy on a disk of this node.
        look_again: time (`time.monotonic`) of the next check for such a copy.

    Raises:
        OSError: it cannot be opened.
        ShardError: its length is not that in the manifest.
    """

    def __init__(self, path: Path, size: int, maps: ChunkMaps, is_local: bool = False) -> None:
        self._path, self._size, self._maps = path, size, maps
        self.is_local = is_local
        self.look_again = time.monotonic() + _LOOK_EVERY_S
        self._h5: h5py.File | None = None
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.identity = identity(os.fstat(self._fd))
        self.is_unchanged()

    @property
    def h5(self) -> h5py.File:
        """The shard as an HDF5 file."""
        if self._h5 is None:
            # Locks are slow or missing on parallel file systems, and shards are read-only.
            h5 = h5py.File(self._path, "r", locking=False)
            if identity(os.stat(self._path)) != self.identity:
                h5.close()
                raise OSError("it was replaced or changed while it was opened")
            self._h5 = h5
        return self._h5

    def is_unchanged(self) -> bool:
        """Whether the file is unchanged since it was opened.

        Raises:
            ShardError: its length has changed.
        """
        now = identity(os.fstat(self._fd))
        if now[2] != self._size:
            raise ShardError(
                f"{self._path} has {now[2]} bytes, the manifest records {self._size}; "
                "it was truncated or changed, copy or write the data set again"
            )
        return now == self.identity

    def read(self, name: str, out: Pixels, where: Where, codec: Codec = "raw") -> None:
        """Copy a non-empty box of a dataset to `out`.

        Raises:
            OSError, KeyError, TypeError, ValueError, RuntimeError: damaged, or no such dataset or
                box.
        """
        key = self.identity, name
        chunks = self._maps.get(key)
        if chunks is None:
            stacked = not isinstance(where[0], slice)
            spatial = len(where) - stacked
            dataset = own_dataset(self.h5, name)
            chunks = map_chunks(dataset, stacked, self._size, codec, spatial)
            self._maps.put(key, chunks)
        if chunks.dtype != out.dtype:
            raise ValueError(f"it has type {chunks.dtype}, expected {out.dtype}")
        if codec == "raw":
            read_raw(self._fd, chunks, out, where)
        else:
            read_coded(self._fd, chunks, codec, out, where, key)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class OpenShards:
    """LRU cache of the shards that this process has open.

    Attributes:
        local: folder that may hold copies of them, now or later, see `staging.cache.Job`.
    """

    def __init__(self, folder: Path, local: Path | None = None) -> None:
        self._folder, self.local = folder, local
        self._reset()

    def get(self, info: ShardInfo) -> OpenShard:
        """An open shard in its current state.

        Raises:
            OSError, ShardError: see `OpenShard`.
        """
        if self._process != os.getpid():  # after a fork the handles are the parent's
            self._reset()
        with self._lock:
            shard = self._shards.get(info.file)
            if shard is None or not self._is_current(shard, info):
                shard = None
                self._shards.pop(info.file, None)
                if len(self._shards) >= _OPEN_SHARDS:
                    self._shards.popitem(last=False)
                shard = self._shards[info.file] = self._open(info)
            self._shards.move_to_end(info.file)
            return shard

    def reading(self, shard: OpenShard) -> AbstractContextManager[None]:
        """Context for reading a box of a shard; staging pauses for reads from the source."""
        if shard.is_local or self.local is None:
            return nullcontext()
        return reading_source(self.local)

    def distrust(self, info: ShardInfo, why: object) -> None:
        """Read a shard from its source from now on: its local copy is unusable."""
        with self._lock:
            local, host = self.local, socket.gethostname()
            if local is None or info.file in self._distrusted:
                return
            self._distrusted.add(info.file)
            self._shards.pop(info.file, None)
            if not local.is_dir():
                self.local = None
                text = "%s: the copies in %s are gone; reading from %s"
                log.warning(text, host, local, self._folder)
            elif _is_first(local / f".distrusted-{info.file}"):
                text = "%s: the copy of %s in %s is unusable (%s); reading it from %s"
                log.warning(text, host, info.file, local, why, self._folder)

    def _is_current(self, shard: OpenShard, info: ShardInfo) -> bool:
        """Whether to keep reading from an open shard, as of the last check."""
        if shard.is_local:
            try:
                if shard.is_unchanged():
                    return True
            except ShardError:
                pass
            self.distrust(info, "it was changed")
            return False
        if self.local is not None and (now := time.monotonic()) >= shard.look_again:
            shard.look_again = now + _LOOK_EVERY_S
            if info.file not in self._distrusted and (self.local / local_name(info)).exists():
                return False
        return shard.is_unchanged()

    def _open(self, info: ShardInfo) -> OpenShard:
        if self.local is not None and info.file not in self._distrusted:
            path = self.local / local_name(info)
            try:
                shard = OpenShard(path, info.bytes, self._maps, is_local=True)
                self._arrived.add(info.file)
                return shard
            except FileNotFoundError:
                if info.file in self._arrived:
                    self.distrust(info, "it is gone")
            except (OSError, ShardError) as error:
                self.distrust(info, error)
        return self._from_source(info)

    def _from_source(self, info: ShardInfo) -> OpenShard:
        path = self._folder / info.file
        shard = OpenShard(path, info.bytes, self._maps)
        before = self._known.setdefault(info.file, shard.identity)
        if shard.identity != before:
            if sha256_of(path) != info.sha256:
                raise ShardError(
                    f"{path} was changed or replaced since it was first read, and its SHA-256 is "
                    "not that of the manifest; open the data set again, or write it again"
                )
            self._known[info.file] = shard.identity  # e.g. copied again
        return shard

    def close(self) -> None:
        """Close all shards; those being read close afterwards."""
        self._shards.clear()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._shards: OrderedDict[str, OpenShard] = OrderedDict()
        self._maps = ChunkMaps()
        self._known: dict[str, Identity] = {}
        self._arrived: set[str] = set()
        self._distrusted: set[str] = set()

    def __reduce__(self) -> tuple[type[OpenShards], tuple[Path, Path | None]]:
        return OpenShards, (self._folder, self.local)


def identity(status: os.stat_result) -> Identity:
    """The identity of a file's current state."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_first(marker: Path) -> bool:
    """Whether this is the first process of the node to set the marker; True on other errors."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True
