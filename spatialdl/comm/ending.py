"""Aborting a job from one of its ranks, and what remains of it: a reason, no empty folder."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from spatialdl.comm.liveness import report_exit

_SURELY_S = 10.0
_RELAYED_S = 0.2  # or launchers print their messages between the output of ranks


class _Run:
    log: Path | None = None
    folder: Path | None = None


def note_run(*, log: Path | None = None, folder: Path | None = None) -> None:
    """Set the log file for the reason of an end, and the folder to remove if it is empty then."""
    _Run.log, _Run.folder = log or _Run.log, folder or _Run.folder


def forget_run(*, keep: bool = False) -> None:
    """Forget the run directory and its log; remove the directory if it is empty.

    Args:
        keep: whether to keep an empty directory, too: a job will use it.
    """
    if not keep and _Run.folder is not None and _Run.folder != Path.cwd():
        with suppress(OSError):
            _Run.folder.rmdir()
    _Run.log = _Run.folder = None


def record_ending(reason: str, log: Path | None = None) -> None:
    """Append the reason why the run ends to its log file, if there is one.

    Args:
        reason: one sentence, or a traceback.
        log: log file; by default that of `note_run`.
    """
    log = log or _Run.log
    if log is None or not log.is_file():
        return
    now = time.time()
    stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now % 1 * 1000):03d}"
    with suppress(OSError), log.open("a") as file:  # a full disk
        file.write(f"[{stamp}][spatialdl][ERROR] - {reason.strip()}\n")


def end_job(code: int) -> None:
    """Exit at once with all ranks of the MPI world, if it has several."""
    report_exit()
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    running = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    if mpi is not None and running and mpi.COMM_WORLD.size > 1:
        time.sleep(_RELAYED_S)
        mpi.COMM_WORLD.Abort(code)
    forget_run()
    os._exit(code)


def end_job_for_sure() -> None:
    """`end_job`, even if MPI is stuck."""
    threading.Thread(target=end_job, args=(1,), daemon=True).start()
    time.sleep(_SURELY_S)
    os._exit(1)
