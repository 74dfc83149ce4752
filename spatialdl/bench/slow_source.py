"""Emulated file server: a folder whose files are read at a rate shared by all processes.

Requests of all processes and threads are served in sequence and in pieces, so that concurrent
readers share the rate. It throttles `os.preadv`, which shards with io="pread" and the copier use,
in every Python process with the hook's folder in its PYTHONPATH. The file uses the standard library
only, as those processes run a copy of it at start (`sitecustomize`).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_VARIABLE = "SPATIALDL_BENCH_SLOW_SOURCE"
_STATE = struct.Struct("dQ")  # time at which the server is free again, and bytes served
_PIECE = 2**20  # bytes per request, as of network file systems
_IDLE_S = 0.05  # seconds of read-ahead of an idle server


class SlowSource:
    """Rate limiter shared by processes.

    Args:
        state: a file accessible to all processes.
        rate: bytes per second.
    """

    def __init__(self, state: str, rate: float) -> None:
        self._state, self._rate = state, rate

    def serve(self, count: int) -> None:
        """Block until `count` bytes have been served."""
        while count > 0:
            piece = min(count, _PIECE)
            self._wait(piece)
            count -= piece

    def served(self) -> int:
        """Bytes served so far, to all processes."""
        try:
            return int(_STATE.unpack(Path(self._state).read_bytes())[1])
        except FileNotFoundError:
            return 0

    def _wait(self, count: int) -> None:
        # opened each time: forked processes would share a lock
        file = os.open(self._state, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            known = os.pread(file, _STATE.size, 0)
            free, served = _STATE.unpack(known) if known else (0.0, 0)
            free = max(free, time.monotonic() - _IDLE_S) + count / self._rate
            os.pwrite(file, _STATE.pack(free, served + count), 0)
        finally:
            os.close(file)
        time.sleep(max(0.0, free - time.monotonic()))


def environment(folder: Path, rate: float, work: Path) -> tuple[SlowSource, Mapping[str, str]]:
    """Environment variables of processes that read `folder` at `rate`.

    Args:
        folder: the throttled folder.
        rate: bytes per second.
        work: an empty folder for hook and state.
    """
    hook, state = work / "hook", work / "state"
    hook.mkdir()
    shutil.copyfile(__file__, hook / "sitecustomize.py")
    settings = {"folder": str(folder.resolve()), "state": str(state), "rate": rate}
    path = os.pathsep.join(filter(None, [str(hook), os.getenv("PYTHONPATH")]))
    return SlowSource(str(state), rate), {_VARIABLE: json.dumps(settings), "PYTHONPATH": path}


def _install(folder: str, state: str, rate: float) -> None:
    source, plain = SlowSource(state, rate), os.preadv

    def preadv(file: int, buffers: Any, offset: int, flags: int = 0) -> int:
        count = plain(file, buffers, offset, flags)
        if _name(file).startswith(folder + os.sep):
            source.serve(count)
        return count

    os.preadv = preadv


def _name(file: int) -> str:
    return os.readlink(f"/proc/self/fd/{file}")


def _start(environ: Mapping[str, str], install: Callable[..., None]) -> None:
    if _VARIABLE in environ:
        install(**json.loads(environ[_VARIABLE]))


if __name__ == "sitecustomize":
    _start(os.environ, _install)
