"""Stop signals: the run finishes its step, writes a checkpoint, and exits with code 0.

A second signal ends it at once, and so do SIGINT and SIGTERM before the first step is done, when
there is nothing to save. SIGUSR1 asks for a checkpoint in any case: schedulers send it before a
time limit, and start the run again. Signals within one second count as one, because schedulers and
launchers may both signal a rank. A separate thread receives them, because Python runs no handlers
while the main thread waits in MPI.
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
from spatialdl.comm.ending import end_job, record_ending
from spatialdl.comm.launch import launched
from spatialdl.comm.liveness import SWITCH, announced_signal, print_last
from spatialdl.common.files import replacing

MARKER = "stopped.json"
"""File in the run directory for scripts that restart the run."""

_AS_ONE_S = 1.0
_HEAD_START_S = 1.0  # for rank 0 to end a job of which all ranks were signalled


class _Seen:
    installed = False
    has_stepped = False
    first: int | None = None
    at = 0.0


def install() -> None:
    """Install the handlers, from the main thread only.

    A signal that `spatialdl.comm.early_signals` has recorded counts too.
    """
    if _Seen.installed:
        return
    _Seen.installed = True
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # so that a signal reaches exactly one of the old and the new handler
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
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
    info = launched()
    is_first_rank = info is None or info.rank == 0
    if _Seen.first is None:
        announced = announced_signal() if number == signal.SIGUSR1 else None
        number = announced if announced in STOPPING else number
        if not _Seen.has_stepped and number != signal.SIGUSR1:
            if not is_first_rank:
                time.sleep(_HEAD_START_S)
            if SWITCH in os.environ and announced is None:
                end_job(128 + number)  # the launcher ends the job for another rank's error
            text = f"stopped by {signal.Signals(number).name} before the first step was done"
            record_ending(text)
            print_last(text)
            end_job(128 + number)
        _Seen.first, _Seen.at = number, now
        if is_first_rank:
            sys.stderr.write("stopping after this step; send the signal again to exit at once\n")
    elif number == signal.SIGINT or now - _Seen.at >= _AS_ONE_S:
        end_job(128 + number)


def step_done() -> None:
    """Note that there is a step to save, for which SIGINT and SIGTERM wait from now on."""
    _Seen.has_stepped = True


def seen() -> bool:
    """Whether this rank has received a stop signal."""
    return _Seen.first is not None


def ignore() -> None:
    """Ignore stop signals at the end of a run, when they would kill a rank that waits for peers."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def flags() -> list[float]:
    """For each of `STOPPING`, 1 if this rank received it first, else 0; to be all-reduced."""
    return [float(_Seen.first == number) for number in STOPPING]


def agreed(sums: Sequence[float]) -> signal.Signals | None:
    """Signal for which all ranks stop, from the sums of their `flags`; None without one."""
    return next((number for number, count in zip(STOPPING, sums, strict=True) if count), None)


def write_marker(run_dir: Path, number: signal.Signals, step: int, saved: int | None) -> None:
    """Write the marker file of a stopped run.

    Args:
        run_dir: run directory.
        number: the signal.
        step: last step.
        saved: step of the last complete checkpoint.
    """
    marker = {"signal": number.name, "step": step, "checkpoint": saved}
    with replacing(run_dir / MARKER) as file:
        file.write(json.dumps(marker).encode())
