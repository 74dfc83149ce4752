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
    """Abort the job of a command on all ranks on an uncaught exception in the main thread."""
    sys.excepthook = functools.partial(_end, None)


def end_job_on_errors() -> None:
    """Abort all ranks of a user's program on an uncaught exception in its main thread.

    The previous hook prints it first. Interactive sessions are not aborted. Exceptions in other
    threads are left to Python, which does not end the program for them.
    """
    before = sys.excepthook
    if getattr(before, "func", None) is not _end:
        sys.excepthook = functools.partial(_end, before)


def _end(
    before: Callable[..., object] | None,
    kind: type[BaseException],
    error: BaseException,
    where: TracebackType | None,
    /,
) -> None:
    if before is not None and (hasattr(sys, "ps1") or sys.flags.interactive):
        before(kind, error, where)
        return
    is_interrupt = isinstance(error, KeyboardInterrupt)
    info = launched()
    try:
        if not is_interrupt and (_is_lost_connection(error) or (info and info.rank != 0)):
            time.sleep(_HEAD_START_S)  # or all ranks print an error that all have
        if before is not None:
            _print_in_program(before, kind, error, where)
        elif not is_interrupt:
            _print_in_command(error)
        if info and info.launcher == "torchrun":
            _record_for_torchrun(error)
    finally:
        end_job(130 if is_interrupt else 1)


def _print_in_command(error: BaseException) -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()  # messages buffered for rank 0
    text = f"{_this_rank('error')}: {describe_error(error)}"
    if _is_lost_connection(error):
        print_stderr(text)  # the other rank's error matters more, and must come last
    else:
        print_last(text)
        record_ending(text)


def _print_in_program(
    before: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    where: TracebackType | None,
) -> None:
    is_lost = _is_lost_connection(error)
    if not is_lost:
        before(kind, error, where)
    first = (describe_error(error) if is_lost else str(error)).strip().partition("\n")[0]
    text = f"aborts the job: {kind.__name__}: {first}"
    if isinstance(error, CommMismatch):
        from spatialdl.comm.watchdog import end_job_with_reports  # imports PyTorch

        end_job_with_reports(text)
    print_stderr(f"{_this_rank('this process')} {text}")


def _this_rank(alone: str) -> str:
    info = launched()
    return f"rank {info.rank} on {socket.gethostname()}" if info else alone


def _record_for_torchrun(error: BaseException) -> None:
    """Record the error for the table that torchrun prints at the end."""
    with suppress(Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error  # it records the exception that is being handled
        except BaseException as again:
            get_error_handler().record_exception(again)
