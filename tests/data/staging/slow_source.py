"""A file system whose files come slowly, as those of a file server that has too much to do.

The files of a folder, mounted by FUSE (the protocol of linux/fuse.h, version 7.31), read-only: they
are read at so many bytes a second, all together. At no bytes a second the process that serves them
stops itself (SIGSTOP) when the first is read, and no read returns.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LOOKUP, FORGET, GETATTR, OPEN, READ = 1, 2, 3, 14, 15
STATFS, RELEASE, FLUSH, INIT, INTERRUPT, FORGETS = 17, 18, 25, 26, 36, 42
NO_ANSWER = (FORGET, INTERRUPT, FORGETS)
HEAD, ANSWER = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")
ATTRIBUTES = struct.Struct("=6Q10I")
VALID_S = 3600


@contextmanager
def coming_slowly(
    folder: Path, place: Path, bytes_a_second: float
) -> Iterator[subprocess.Popen[str]]:
    """The files of a folder at another place; the process that serves them."""
    place.mkdir()
    command = [sys.executable, __file__, str(folder), str(place), str(bytes_a_second)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as serving:
        try:
            assert serving.stdout is not None
            if serving.stdout.readline() != "mounted\n":
                pytest.skip("needs the right to mount a file system of FUSE")
            yield serving
        finally:
            serving.kill()  # so that nobody waits for it
            subprocess.run(["umount", "-l", place], capture_output=True, check=False)


def attributes(node: int, of: os.stat_result) -> bytes:
    times = [int(of.st_mtime)] * 3
    parts = [of.st_mtime_ns % 10**9] * 3
    return ATTRIBUTES.pack(
        *(node, of.st_size, of.st_blocks, *times, *parts),
        *(of.st_mode, 1, of.st_uid, of.st_gid, 0, 4096, 0),
    )


class Files:
    """What the kernel asks about the files of a folder; the folder itself is node 1."""

    def __init__(self, folder: Path, bytes_a_second: float) -> None:
        self._paths = {1: folder}
        self._paths |= dict(enumerate(sorted(folder.iterdir()), 2))
        self._rate = bytes_a_second
        self.answers: dict[int, Callable[[int, bytes], bytes]] = {
            INIT: self._init,
            LOOKUP: self._lookup,
            GETATTR: self._getattr,
            OPEN: lambda node, body: struct.pack("=QII", node, 0, 0),
            READ: self._read,
            STATFS: lambda node, body: bytes(80),
            RELEASE: lambda node, body: b"",
            FLUSH: lambda node, body: b"",
        }

    def _init(self, node: int, body: bytes) -> bytes:
        return struct.pack("=IIIIHHIIHHI28x", 7, 31, 131072, 0, 12, 10, 4096, 1, 0, 0, 0)

    def _lookup(self, node: int, body: bytes) -> bytes:
        wanted = body.rstrip(b"\0").decode()
        found = next((n for n, path in self._paths.items() if n > 1 and path.name == wanted), None)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, wanted)
        valid = struct.pack("=QQQQII", found, 0, VALID_S, VALID_S, 0, 0)
        return valid + attributes(found, self._paths[found].stat())

    def _getattr(self, node: int, body: bytes) -> bytes:
        return struct.pack("=QII", VALID_S, 0, 0) + attributes(node, self._paths[node].stat())

    def _read(self, node: int, body: bytes) -> bytes:
        if not self._rate:
            os.kill(os.getpid(), signal.SIGSTOP)
        _, offset, size = struct.unpack_from("=QQI", body)
        with self._paths[node].open("rb") as file:
            data = os.pread(file.fileno(), size, offset)
        time.sleep(len(data) / self._rate)
        return data


def serve(folder: Path, place: Path, bytes_a_second: float) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"slow", os.fsencode(place), b"fuse.slow", 1, options.encode()):
        raise OSError(ctypes.get_errno(), "cannot mount")
    print("mounted", flush=True)
    files = Files(folder, bytes_a_second)
    while True:
        try:
            request = os.read(device, 2**20)
        except OSError as error:
            if error.errno == errno.ENODEV:  # it is mounted no longer
                return
            continue
        _, kind, unique, node, *_ = HEAD.unpack_from(request)
        if kind in NO_ANSWER:
            continue
        body, failed = b"", 0
        try:
            if kind not in files.answers:
                raise OSError(errno.ENOSYS, "unknown")
            body = files.answers[kind](node, request[HEAD.size :])
        except OSError as error:
            failed = -(error.errno or errno.EIO)
        os.write(device, ANSWER.pack(ANSWER.size + len(body), failed, unique) + body)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
