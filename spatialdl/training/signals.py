"""Signals that ask a run to stop: it ends its step, writes a checkpoint, and leaves with code 0.

A second one ends it at once. Signals that come within a second count as one: schedulers and
launchers may tell a rank in several ways. They are seen by a thread of their own, because the main
thread may be waiting for other ranks in MPI, where Python runs no handlers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from spatialdl.comm.early_signals import STOPPING, take
from spatialdl.comm.ending import end_job
from spatialdl.comm.launch import launched
from spatialdl.data.saving import replacing

MARKER = "stopped.json"
"""In the run directory, for a script that starts the run again."""

_AS_ONE_S = 1.0


class _Seen:
    installed = False
    first: int | None = None
    at = 0.0


def install() -> None:
    """From now on these signals ask for a stop; only the main thread may call it.

    One that was kept by `spatialdl.comm.early_signals` does so, too.
    """
    if _Seen.installed:
        return
    _Seen.installed = True
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # none comes to neither or both of two
    for number in STOPPING:
        signal.signal(number, _leave_to_thread)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    for number in take()[:1]:
        _see(number)
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    return None


def _watch(reader: int) -> None:
    while True:
        for number in os.read(reader, 64):
            if number in STOPPING:
                _see(number)


def _see(number: int) -> None:
    now = time.monotonic()
    if _Seen.first is None:
        _Seen.first, _Seen.at = number, now
        info = launched()
        if info is None or info.rank == 0:
            sys.stderr.write("stopping after this step; the same again to leave at once\n")
    elif number == signal.SIGINT or now - _Seen.at >= _AS_ONE_S:
        end_job(128 + number)


def seen() -> bool:
    """Whether one has asked this rank for a stop."""
    return _Seen.first is not None


def ignore() -> None:
    """From now on: the run is over, and Python would let them kill a rank that waits for others."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def flags() -> list[float]:
    """For each of `STOPPING` whether this rank has seen it first; 0 or 1, to be added up."""
    return [float(_Seen.first == number) for number in STOPPING]


def agreed(sums: Sequence[float]) -> signal.Signals | None:
    """The signal for which all ranks stop, from the sums of their `flags`."""
    return next((number for number, count in zip(STOPPING, sums, strict=True) if count), None)


def write_marker(run_dir: Path, number: signal.Signals, step: int, saved: int | None) -> None:
    """Leave word that the run was stopped.

    Args:
        step: after which it was.
        saved: step of the last whole checkpoint.
    """
    found = {"signal": number.name, "step": step, "checkpoint": saved}
    with replacing(run_dir / MARKER) as file:
        file.write(json.dumps(found).encode())
