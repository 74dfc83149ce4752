"""Detects which rank died first, and prints final messages after the launcher's output.

Launchers print messages of their own when a job fails, and some name no rank. Ranks on the machine
of the process that started them therefore report to it over a socket in a folder private to the
user. A rank's final message is printed after the launcher has exited, as the last output.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Self

SWITCH = "SPATIALDL_ROLL_CALL"
_SIGNAL = "signal"  # file beside the socket
_MOST, _MOST_BYTES = 20_000, 200_000

# --- a rank


def report_start(rank: int) -> None:
    """Report to the starting process that this rank runs."""
    _send({"rank": rank, "pid": os.getpid()})


def report_exit() -> None:
    """Report that this rank exits, or is killed, on purpose."""
    _send({"said": ""})


def print_last(text: str) -> None:
    """Print a message after all other output of the aborted job."""
    if not _send({"said": text[-_MOST:]}):
        print_stderr(text)


def print_stderr(text: str) -> None:
    """Print to the launcher's standard error, unbuffered: launchers mix partial lines."""
    stream = sys.__stderr__
    if stream is not None:
        stream.write(f"{text}\n")
        stream.flush()


def announced_signal() -> signal.Signals | None:
    """Signal for which the starting process sent SIGUSR1; None if it sent none, or elsewhere."""
    with suppress(OSError, ValueError):
        if SWITCH in os.environ:
            text = Path(os.environ[SWITCH]).with_name(_SIGNAL).read_text()
            return signal.Signals(int(text))
    return None


def _send(message: dict[str, object]) -> bool:
    """Send to the starting process; return whether it was received."""
    if SWITCH not in os.environ:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.settimeout(1)
            to.sendto(json.dumps(message).encode(), os.environ[SWITCH])
    except OSError:  # the starting process is on another machine
        return False
    return True


# --- the process that starts ranks


class Liveness:
    """Monitors the ranks on this machine; a context manager around their run.

    Args:
        world_size: number of ranks.

    Attributes:
        environment: environment variables for the ranks; empty where unsupported.
        complete: set once all ranks have reported, which those on other machines cannot.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.environment: dict[str, str] = {}
        self.complete = Event()
        self._folder: str | None = None
        self._pids: dict[int, int] = {}
        self._exits: list[list[int]] = []
        self._messages: list[str] = []
        self._expected = self._explained = False

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
        self.environment = {SWITCH: path}
        self._ends, self._end = os.pipe()
        self._thread = Thread(target=self._listen, name="roll call", daemon=True)
        # a signal handled by this thread would not interrupt the main thread's wait for a process
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
        for text in self._messages:
            print_stderr(text)
        self._messages = []

    def vanished(self) -> str | None:
        """Description of the first rank that died without a message; None if unknown."""
        if self._expected or len(self._pids) < self._world_size or not self._exits:
            return None
        ranks = [f"rank {rank} (process {self._pids[rank]})" for rank in sorted(self._exits[0])]
        first = ranks[0] if len(ranks) == 1 else f"one of {', '.join(ranks)}"
        cause = "by SIGKILL, as when the kernel runs out of memory, or by a crash"
        return f"{first} on {socket.gethostname()} died without an error message, {cause}"

    @property
    def explained(self) -> bool:
        """Whether a rank has printed why the job ends."""
        return self._explained

    def announce(self, number: int) -> None:
        """Tell ranks on this machine which signal the next SIGUSR1 stands for."""
        if self._folder is not None:
            (Path(self._folder) / _SIGNAL).write_text(str(int(number)))

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._ends, selectors.EVENT_READ)
            while True:
                ready = [key for key, _ in selector.select()]
                exited = [key for key in ready if key.data is not None]
                for key in exited:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                if exited:
                    self._exits.append([key.data for key in exited])
                if any(key.fileobj is self._socket for key in ready):
                    self._receive(selector)
                elif any(key.fd == self._ends for key in ready):
                    return

    def _receive(self, selector: selectors.BaseSelector) -> None:
        with suppress(ValueError, KeyError, OSError):
            message = json.loads(self._socket.recv(_MOST_BYTES))
            if "said" in message:
                self._expected = True
                self._explained |= bool(message["said"])
                if message["said"] and message["said"] not in self._messages:
                    self._messages.append(str(message["said"]))
                return
            rank, pid = int(message["rank"]), int(message["pid"])
            descriptor = os.pidfd_open(pid)
            selector.register(descriptor, selectors.EVENT_READ, rank)
            self._pids[rank] = pid
            if len(self._pids) == self._world_size:
                self.complete.set()
