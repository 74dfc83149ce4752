"""Copying a data set folder: every shard verified, and the manifest last."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from spatialdl.data.format import MANIFEST, Manifest, shard_status
from spatialdl.data.saving import fsync_folder, replacing, show
from spatialdl.data.staging.cache import local_name
from spatialdl.data.staging.copying import BusyError, StoppedError, WriteError, fetch, is_whole
from spatialdl.data.staging.local_disk import DiskSpace
from spatialdl.data.staging.samples import of_splits, samples_in
from spatialdl.errors import ShardError
from spatialdl.text import counted, readable_bytes

_NAMED = 3  # faults that are told in full


@dataclass(frozen=True)
class CopyResult:
    """What a copy of a folder took: shards and bytes in it, and of these what was there."""

    shards: int
    bytes: int
    there: int


def copy_folder(
    source: Path,
    target: Path,
    splits: Sequence[str] = (),
    *,
    at_once: int = 4,
    keep_free: int | None = None,
) -> CopyResult:
    """Copy a data set folder; `target` is one as soon as all of it is there.

    Shards that are there already are verified; what an interrupted copy has left is resumed.

    Args:
        source: the data set folder.
        target: the folder to be made.
        splits: leave out shards and samples of others; none keeps all.
        at_once: files.
        keep_free: bytes of the disk that stay free, see `DiskSpace`.

    Raises:
        ShardError: a shard is missing or damaged, `target` holds something else, there is no
            room, or somebody else is at it; what is whole stays.
        ValueError: there is no such split.
        OSError: a file cannot be read or written.
    """
    manifest = Manifest.load(source)
    text = (source / MANIFEST).read_bytes()
    if splits:
        manifest = of_splits(manifest, splits)
    for info in manifest.shards:
        local_name(info)
        with suppress(OSError):  # said when it is copied
            shard_status(source, info)
    if target.exists() and not target.is_dir():
        raise ShardError(f"{target} is a file; name a folder")
    if target.exists() and target.samefile(source):
        raise ShardError(f"{target} is the data set itself; name another folder")
    may_replace = (target / MANIFEST).exists()
    if may_replace and Manifest.load(target) != manifest:
        raise ShardError(
            f"{target} holds another data set, or an older state of this one; name another folder "
            f"or remove it"
        )
    _check_room(manifest, target, keep_free)
    target.mkdir(parents=True, exist_ok=True)
    with _Copying(source, target, manifest, may_replace) as copying:
        there = copying.run(at_once)
    if not splits:
        with replacing(target / MANIFEST) as out:
            out.write(text)
    else:
        manifest.save(target)
    return CopyResult(len(manifest.shards), sum(info.bytes for info in manifest.shards), there)


class _Copying:
    """Copies of the shards under way."""

    def __init__(self, source: Path, target: Path, manifest: Manifest, may_replace: bool) -> None:
        self._source, self._target, self._manifest = source, target, manifest
        self._may_replace = may_replace
        self._stopped = threading.Event()
        self._faults: list[str] = []
        total = sum(info.bytes for info in manifest.shards)
        self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="staging", disable=None)

    def __enter__(self) -> _Copying:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._bar.close()

    def run(self, at_once: int) -> int:
        """Bring all shards to the target; returns the bytes that were there."""
        with ThreadPoolExecutor(at_once) as threads:
            shards = range(len(self._manifest.shards))
            tasks = [threads.submit(self._bring, shard) for shard in shards]
            try:
                there = sum(task.result() for task in tasks)
            except BaseException:
                self._stopped.set()  # also on Ctrl-C: the threads end in a moment
                raise
        if self._faults:
            more = len(self._faults) - _NAMED
            told = " ".join(self._faults[:_NAMED]) + (f" And {more} more." if more > 0 else "")
            raise ShardError(f"{counted(len(self._faults), 'shard')} cannot be copied: {told}")
        fsync_folder(self._target)
        return there

    def _bring(self, shard: int) -> int:
        info = self._manifest.shards[shard]
        path = self._target / info.file
        try:
            if path.exists():
                if is_whole(path, info, self._stopped.is_set, self._bar.update):
                    return info.bytes
                if not self._may_replace:
                    raise FileExistsError(
                        f"{path} is another file than {self._source / info.file}; remove it, or "
                        "name another folder"
                    )
            partial = path.with_name(f".{info.file}.part")
            fetch(
                self._source / info.file,
                partial,
                info,
                lambda: _rename(partial, path),
                stopped=self._stopped.is_set,
                progress=self._bar.update,
            )
        except StoppedError:
            pass
        except BusyError as error:
            raise ShardError(f"{error}; wait for it, or name another folder") from None
        except WriteError as error:
            raise WriteError(
                error.errno, f"cannot write to {self._target}: {error.strerror}"
            ) from error
        except (ShardError, OSError) as error:
            self._faults.append(f"{error}. It holds {samples_in(self._manifest, shard)}.")
        return 0


def _check_room(manifest: Manifest, target: Path, keep_free: int | None) -> None:
    needed = 0
    for info in manifest.shards:
        there = (target / info.file, target / f".{info.file}.part")
        needed += max(0, info.bytes - sum(p.stat().st_size for p in there if p.exists()))
    disk = next(path for path in (target, *target.parents) if path.exists())
    room = DiskSpace(disk, keep_free).bytes
    if needed > room:
        raise ShardError(
            f"{target} has room for {readable_bytes(max(room, 0))} besides what stays free, "
            f"{readable_bytes(needed)} are needed; make room, name another folder, or choose "
            "splits by --split"
        )


def _rename(partial: Path, path: Path) -> None:
    show(partial)
    partial.replace(path)
