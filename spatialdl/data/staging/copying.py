"""Copy of one shard: resumable, hashed during the copy, and published only when verified."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from spatialdl.common.files import FileLock
from spatialdl.data.samples import ShardInfo
from spatialdl.errors import ShardError

_AT_A_TIME = 8 * 2**20  # bytes; parallel file systems favour large requests
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ADVICE = "copy or write the data set again"


class WriteError(OSError):
    """A write to the target disk failed."""

    @property
    def is_full(self) -> bool:
        return self.errno in _NO_ROOM


class BusyError(Exception):
    """Another process is writing this file."""


class StoppedError(Exception):
    """The copy was stopped; it can be resumed."""


def _never() -> bool:
    return False


def _ignore(count: int) -> None:
    return None


def fetch(
    source: Path,
    partial: Path,
    info: ShardInfo,
    publish: Callable[[], None],
    *,
    stopped: Callable[[], bool] = _never,
    progress: Callable[[int], object] = _ignore,
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    arrived: Callable[[], bool] = _never,
) -> bool:
    """Copy a shard to a temporary name, and publish it once its SHA-256 is verified.

    A partial file under the temporary name is hashed and resumed. If the checksum is wrong at the
    end, the shard is copied once more: a crash may have left a hole, or the source was still being
    written.

    Args:
        source: the shard.
        partial: the temporary name; one process at a time writes to it. It is kept if the copy is
            stopped or the source cannot be read, and removed if the copy is damaged.
        info: manifest entry of the shard.
        publish: renames `partial` to the final name.
        stopped: called every few MB; true stops the copy.
        progress: called with byte counts, including resumed bytes; negative on a restart.
        turn: context in which each piece is read.
        arrived: called once no other process can write to the temporary name; whether the shard
            was copied in the meantime.

    Returns:
        Whether it was copied; false if `arrived` was true.

    Raises:
        ShardError: the bytes of the source differ from the manifest.
        WriteError: the disk is full, or not writable.
        BusyError: another process is copying it.
        StoppedError: `stopped` returned true.
        OSError: the source cannot be read.
    """
    with _partial_file(partial) as copy:
        try:
            with writing():
                if arrived():
                    partial.unlink(missing_ok=True)
                    return False
            digest = _copied(source, copy, info, stopped, progress, turn)
            if digest != info.sha256:
                with writing():
                    os.ftruncate(copy, 0)
                progress(-info.bytes)
                digest = _copied(source, copy, info, stopped, progress, turn)
            if digest != info.sha256:
                raise ShardError(
                    f"{source} has SHA-256 {digest[:12]}..., the manifest records "
                    f"{info.sha256[:12]}...; it was damaged or changed, {_ADVICE}"
                )
            with writing():
                os.fsync(copy)
                publish()
            return True
        except (ShardError, WriteError):
            partial.unlink(missing_ok=True)
            raise
        except OSError:
            if not os.fstat(copy).st_size:
                partial.unlink(missing_ok=True)
            raise


def is_whole(
    path: Path,
    info: ShardInfo,
    stopped: Callable[[], bool] = _never,
    progress: Callable[[int], object] = _ignore,
) -> bool:
    """Whether a file has the length and SHA-256 in the manifest.

    Raises:
        StoppedError: `stopped` returned true.
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != info.bytes:
            return False
        digest = hashlib.sha256()
        _hash(file.fileno(), digest, info.bytes, stopped, progress)
        return digest.hexdigest() == info.sha256


@contextmanager
def _partial_file(path: Path) -> Iterator[int]:
    with writing():
        try:
            lock = FileLock(path)
        except BlockingIOError:
            raise BusyError(f"another process is writing {path}") from None
    with lock:
        if os.fstat(lock.descriptor).st_uid != os.getuid():
            raise ShardError(f"{path} belongs to another user: remove it, or choose another folder")
        yield lock.descriptor


def _copied(
    source: Path,
    copy: int,
    info: ShardInfo,
    stopped: Callable[[], bool],
    progress: Callable[[int], object],
    turn: Callable[[], AbstractContextManager[None]],
) -> str:
    """Append the missing bytes to a copy; return the SHA-256 of all of it."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_AT_A_TIME))
    with source.open("rb", buffering=0) as file:
        _check_size(source, os.fstat(file.fileno()).st_size, info)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        done = min(os.fstat(copy).st_size, info.bytes)
        with writing():
            os.ftruncate(copy, done)
        _hash(copy, digest, done, stopped, progress)
        while done < info.bytes:
            if stopped():
                raise StoppedError
            with turn():
                count = os.preadv(file.fileno(), [buffer[: info.bytes - done]], done)
            if not count:
                _check_size(source, done, info)
            digest.update(buffer[:count])
            with writing():
                _write(copy, buffer[:count], done)
            done += count
            progress(count)
    return digest.hexdigest()


def _hash(
    file: int,
    digest: hashlib._Hash,
    size: int,
    stopped: Callable[[], bool],
    progress: Callable[[int], object],
) -> None:
    done, buffer = 0, memoryview(bytearray(min(_AT_A_TIME, max(size, 1))))
    while done < size:
        if stopped():
            raise StoppedError
        count = os.preadv(file, [buffer[: size - done]], done)
        if not count:
            raise OSError(errno.EIO, f"unexpected end of file at byte {done} of {size}")
        digest.update(buffer[:count])
        done += count
        progress(count)


def _write(file: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


@contextmanager
def writing() -> Iterator[None]:
    """Attribute errors in this block to the target disk.

    Raises:
        WriteError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(error.errno, error.strerror, error.filename) from error


def _check_size(source: Path, size: int, info: ShardInfo) -> None:
    if size != info.bytes:
        raise ShardError(
            f"{source} has {size} bytes, the manifest records {info.bytes}; it was truncated or "
            f"replaced, {_ADVICE}"
        )


_NAME = "reading"
_QUIET_S = 0.02  # a shorter pause may lie between two boxes of one reader
_LOOK_EVERY_S = 0.005
_PATIENCE_S = 30.0
_UNCONTESTED_S = 1.0


@contextmanager
def reading_source(job: Path) -> Iterator[None]:
    """Hold the lock while a box is read from the source.

    Args:
        job: folder of the job on the disk of the node, see `cache.Job`.
    """
    file = -1
    try:
        with suppress(OSError):  # no copier checks it, or the disk has no locks
            # Opened each time: threads and forked processes would share one lock.
            file = os.open(job / _NAME, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
    finally:
        if file >= 0:
            os.close(file)


class ReadPriority:
    """Decides when the threads of a copier may read from the source.

    They wait until no other process of this node reads, and read one at a time unless the source
    has been idle for a while. If it is not idle for half a minute, training is limited by the
    source in any case, and they stop waiting: training speeds up once all is copied.

    Args:
        job: folder of the job.
        stopped: no thread waits once it is set.
        patience: seconds to wait for an idle source.
    """

    def __init__(self, job: Path, stopped: threading.Event, patience: float = _PATIENCE_S) -> None:
        self._stopped, self._patience = stopped, patience
        self._turns = threading.Lock()
        self._file = -1
        with suppress(OSError):  # the copier reports errors of the disk
            self._file = os.open(job / _NAME, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._quiet = time.monotonic()  # when the source was last idle
        self._busy = self._quiet

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context for reading one piece."""
        with self._turns:
            self._wait()
            if time.monotonic() - self._busy < _UNCONTESTED_S:
                yield
                return
        yield

    def close(self) -> None:
        """Close the lock file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _wait(self) -> None:
        while not self._stopped.is_set():
            now = time.monotonic()
            if self._is_read():
                self._busy = now
            elif now - self._busy >= _QUIET_S:
                self._quiet = now
                return
            if now - self._quiet > self._patience:
                return
            self._stopped.wait(_LOOK_EVERY_S)

    def _is_read(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False
