"""Which rank ended first, and what ranks said last, as the process that started them hears it.

A launcher has words of its own when a job fails, and some name no rank. So ranks on the machine of
the process that started them report to it, by messages to a socket in a folder that is private to
the user. What a rank says last it prints when the launcher has ended: nothing comes after it.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Self

SWITCH = "SPATIALDL_ROLL_CALL"
HELD_BACK_S = 5.0
"""Last words wait so long for the launcher to end."""

_MOST, _MOST_BYTES = 20_000, 200_000
_CREDENTIALS = struct.Struct("3i")
_OOM_KILLS = {  # of cgroups(7), version 2 and 1
    "": "/sys/fs/cgroup{}/memory.events",
    "memory": "/sys/fs/cgroup/memory{}/memory.oom_control",
}

# --- a rank


def answer(rank: int) -> None:
    """Tell who started this rank that it is there."""
    _tell({"rank": rank})


def leave() -> None:
    """Tell that this rank ends, or is ended, on purpose."""
    _tell({"said": ""})


def say_last(text: str) -> None:
    """Print what is to be read last; the job ends."""
    if not _tell({"said": text[-_MOST:]}):
        say(text)


def say(text: str) -> None:
    """To the standard error that the launcher sees, at once, or launchers mix lines."""
    stream = sys.__stderr__
    if stream is not None:
        stream.write(f"{text}\n")
        stream.flush()


def _tell(message: dict[str, object]) -> bool:
    """Whether it was heard."""
    if SWITCH not in os.environ:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.settimeout(1)
            to.sendto(json.dumps(message).encode(), os.environ[SWITCH])
    except OSError:  # it is on another machine
        return False
    return True


# --- the process that starts ranks


class Liveness:
    """Open while the ranks run.

    Args:
        world_size: ranks that are started.

    Attributes:
        environment: for the ranks; empty where none is told.
        complete: set once all ranks have answered, which those on other machines cannot.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.environment: dict[str, str] = {}
        self.complete = Event()
        self._folder: str | None = None
        self._pids: dict[int, int] = {}
        self._gone: list[list[int]] = []
        self._words: list[str] = []
        self._expected = False
        self._oom_before = _oom_kills()

    def __enter__(self) -> Self:
        if sys.platform != "linux":
            return self
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._folder = tempfile.mkdtemp(prefix="spatialdl-ranks-")
        path = f"{self._folder}/here"
        try:
            self._socket.bind(path)
        except OSError:  # the path is too long
            return self
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.environment = {SWITCH: path}
        self._ends, self._end = os.pipe()
        self._thread = Thread(target=self._listen, name="roll call", daemon=True)
        # a signal that this thread took would not wake up the main one, which waits for a process
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *raised: object) -> None:
        if self.environment:
            os.close(self._end)
            self._thread.join()
            os.close(self._ends)
        if self._folder is not None:
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._speak()

    def vanished(self) -> str | None:
        """After a failure of which no rank has said anything: who ended first; None if unknown."""
        if self._expected or len(self._pids) < self._world_size or not self._gone:
            return None
        ranks = [f"rank {rank} (process {self._pids[rank]})" for rank in sorted(self._gone[0])]
        who = ranks[0] if len(ranks) == 1 else f"one of {', '.join(ranks)}"
        memory = _oom_kills() - self._oom_before
        why = "the kernel kills for want of memory" if memory else "as by SIGKILL, or by a crash"
        return f"{who} on {socket.gethostname()} vanished without a word, {why}"

    def _listen(self) -> None:
        with selectors.DefaultSelector() as waits:
            waits.register(self._socket, selectors.EVENT_READ)
            waits.register(self._ends, selectors.EVENT_READ)
            speaks_at: float | None = None
            while True:
                pause = None if speaks_at is None else max(0.0, speaks_at - time.monotonic())
                ready = [key for key, _ in waits.select(pause)]
                if not ready:
                    self._speak()
                    speaks_at = None
                gone = [key for key in ready if key.data is not None]
                for key in gone:
                    waits.unregister(key.fileobj)
                    os.close(key.fd)
                if gone:
                    self._gone.append([key.data for key in gone])
                if any(key.fileobj is self._socket for key in ready):
                    self._hear(waits)
                    if self._words and speaks_at is None:
                        speaks_at = time.monotonic() + HELD_BACK_S
                elif any(key.fd == self._ends for key in ready):
                    return

    def _hear(self, waits: selectors.BaseSelector) -> None:
        size = socket.CMSG_SPACE(_CREDENTIALS.size)
        data, ancillary, *_ = self._socket.recvmsg(_MOST_BYTES, size)
        with suppress(ValueError, KeyError, IndexError, OSError):
            message = json.loads(data)
            if "said" in message:
                self._expected = True
                if message["said"] and message["said"] not in self._words:
                    self._words.append(str(message["said"]))
                return
            rank = int(message["rank"])
            pid = _CREDENTIALS.unpack(ancillary[0][2])[0]  # as this process knows it
            descriptor = os.pidfd_open(pid)
            waits.register(descriptor, selectors.EVENT_READ, rank)
            self._pids[rank] = pid
            if len(self._pids) == self._world_size:
                self.complete.set()

    def _speak(self) -> None:
        words, self._words = self._words, []
        for text in words:
            say(text)


def _oom_kills() -> int:
    """How often the kernel has killed for want of memory where this process is counted."""
    found = 0
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            file = Path(_OOM_KILLS.get(controllers, "/none").format(group))
            with suppress(OSError, StopIteration):
                counts = file.read_text().splitlines()
                found += int(next(one for one in counts if one.startswith("oom_kill ")).split()[1])
    return found
