"""Aborts the whole job on one rank's uncaught error, and names the rank and the cause.

Otherwise the other ranks would wait forever in their next exchange. User errors are printed in one
sentence, all other errors with their traceback. All ranks usually raise a user error at once:
ranks other than 0 wait a second for rank 0 to print it and abort the job, so that it appears once.
A rank that lost a connection waits too, so that the launcher detects the failed rank first.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from spatialdl.comm.ending import end_job, record_ending
from spatialdl.comm.launch import launched
from spatialdl.comm.liveness import print_last, print_stderr
from spatialdl.errors import CommMismatch, NotFinite, UnsupportedSpatialOp

USER_MISTAKES = (
    ValueError,
    UnsupportedSpatialOp,
    NotFinite,
    OSError,  # missing, full, or without permission
    HydraException,
    OmegaConfBaseException,
)
_HEAD_START_S = 1.0
_CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Messages of gloo for a peer that exited, whose own error is the relevant one."""


def describe_error(error: BaseException) -> str:
    """Format an error: one sentence for a user error, else the traceback.

    ``HYDRA_FULL_ERROR=1`` in the environment enforces the traceback, as in Hydra.
    """
    if isinstance(error, USER_MISTAKES) and os.environ.get("HYDRA_FULL_ERROR", "0") in ("", "0"):
        text = str(error).partition("\nConfig search path:")[0]
        words = " ".join([text, *getattr(error, "__notes__", ())]).split()
        return " ".join(words) or type(error).__name__
    if _is_lost_connection(error):
        text = str(error).partition("\n")[0]
        reason = text.partition("] ")[2].partition(". This is typ")[0] or text
        return f"lost the connection to another rank, see its error or the launcher's ({reason})"
    return "".join(traceback.format_exception(error)).rstrip()


def exit_with(error: BaseException) -> NoReturn:
    """Print an error as the last output, record it in the run's log, exit with code 1."""
    text = describe_error(error)
    print(f"error: {text}", file=sys.stderr)
    record_ending(text)
    sys.exit(1)


def _is_lost_connection(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(lost in str(error) for lost in _CONNECTION_LOST)


def install_abort_hook() -> None:
    """Abort the job on all ranks on an uncaught exception in the main thread."""
    sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, where: TracebackType | None, /) -> None:
    if isinstance(error, KeyboardInterrupt):
        end_job(130)
    info = launched()
    rank = info.rank if info else 0
    is_lost = _is_lost_connection(error)
    if rank != 0 or is_lost:
        time.sleep(_HEAD_START_S)
    for handler in logging.getLogger().handlers:
        handler.flush()  # messages buffered for rank 0
    where_text = f"rank {rank} on {socket.gethostname()}" if info else "error"
    text = f"{where_text}: {describe_error(error)}"
    if is_lost:
        print_stderr(text)  # the other rank's error matters more, and must come last
    else:
        print_last(text)
        record_ending(text)
        if info and info.launcher == "torchrun":
            _record_for_torchrun(error)
    end_job(1)


def end_job_on_errors() -> None:
    """Abort all ranks of a program on an uncaught exception in its main thread.

    The previous hook prints it first. Interactive sessions are not aborted. Exceptions in other
    threads are left to Python, which does not end the program for them.
    """
    before = sys.excepthook
    if before is not _hook and getattr(before, "func", None) is not _end_after:
        sys.excepthook = functools.partial(_end_after, before)


def _end_after(
    before: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    where: TracebackType | None,
    /,
) -> None:
    if hasattr(sys, "ps1") or sys.flags.interactive:
        before(kind, error, where)
        return
    info = launched()
    rank = f"rank {info.rank} on {socket.gethostname()}" if info else "this process"
    try:
        if not isinstance(error, KeyboardInterrupt) and (info is None or info.rank != 0):
            time.sleep(_HEAD_START_S)  # or all ranks print an error that all have
        if not _is_lost_connection(error):
            before(kind, error, where)
            if info and info.launcher == "torchrun":
                _record_for_torchrun(error)
        first = describe_error(error) if _is_lost_connection(error) else str(error)
        text = f"aborts the job: {kind.__name__}: {first.strip().partition(chr(10))[0]}"
        if isinstance(error, CommMismatch):
            from spatialdl.comm.watchdog import end_job_with_reports  # imports PyTorch

            end_job_with_reports(text)
        print_stderr(f"{rank} {text}")
    finally:
        end_job(130 if isinstance(error, KeyboardInterrupt) else 1)


def _record_for_torchrun(error: BaseException) -> None:
    """Record the error for the table that torchrun prints at the end."""
    with suppress(Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error  # it records the exception that is being handled
        except BaseException as again:
            get_error_handler().record_exception(again)
