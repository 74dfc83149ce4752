"""One rank's uncaught error ends the whole job, and says which rank it was and why.

Without this the other ranks wait for ever in their next exchange. A user's mistake is told in one
sentence, everything else with its traceback. Most mistakes are met by all ranks at once; so that
the sentence appears once, ranks other than 0 give rank 0 a second to print it and end the job. So
does a rank that was left: the launcher is to see first who left it.
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

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from spatialdl.comm.ending import end_job
from spatialdl.comm.launch import launched
from spatialdl.comm.liveness import say, say_last
from spatialdl.errors import CommMismatch, NotFinite, UnsupportedSpatialOp

USER_MISTAKES = (
    ValueError,
    UnsupportedSpatialOp,
    NotFinite,
    OSError,  # a file or folder that is missing, full, or somebody else's
    HydraException,
    OmegaConfBaseException,
)
_HEAD_START_S = 1.0
_CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""How gloo says that a rank has gone; that one's own words are those that matter."""


def describe_error(error: BaseException) -> str:
    """One sentence for a user's mistake, the traceback for anything else.

    ``HYDRA_FULL_ERROR=1`` in the environment asks for the traceback always, as in Hydra.
    """
    if isinstance(error, USER_MISTAKES) and os.environ.get("HYDRA_FULL_ERROR", "0") in ("", "0"):
        text = str(error).partition("\nConfig search path:")[0]
        words = " ".join([text, *getattr(error, "__notes__", ())]).split()
        return " ".join(words) or type(error).__name__
    if _is_lost_connection(error):
        text = str(error).partition("\n")[0]
        why = text.partition("] ")[2].partition(". This is typ")[0] or text
        return f"another rank has gone, see what it or the launcher says ({why})"
    return "".join(traceback.format_exception(error)).rstrip()


def _is_lost_connection(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(lost in str(error) for lost in _CONNECTION_LOST)


def install_abort_hook() -> None:
    """From now on an uncaught exception in the main thread ends the job on all ranks."""
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
        handler.flush()  # what this rank has kept for rank 0 to say
    who = f"rank {rank} on {socket.gethostname()}" if info else "error"
    text = f"{who}: {describe_error(error)}"
    if is_lost:
        say(text)  # what the other one says matters more, and comes after it
    else:
        say_last(text)
        if info and info.launcher == "torchrun":
            _leave_to_torchrun(error)
    end_job(1)


def end_job_on_errors() -> None:
    """From now on an uncaught exception in the main thread of a program ends all its ranks.

    The hook that was there before prints it first. Nothing ends where Python is interactive. Other
    threads are left to Python, which lets the program live when one of them ends.
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
            time.sleep(_HEAD_START_S)  # or all ranks print what all have met
        if not _is_lost_connection(error):
            before(kind, error, where)
            if info and info.launcher == "torchrun":
                _leave_to_torchrun(error)
        first = describe_error(error) if _is_lost_connection(error) else str(error)
        text = f"ends the job: {kind.__name__}: {first.strip().partition(chr(10))[0]}"
        if isinstance(error, CommMismatch):
            from spatialdl.comm.watchdog import end_job_with_reports  # which needs PyTorch

            end_job_with_reports(text)
        say(f"{rank} {text}")
    finally:
        end_job(130 if isinstance(error, KeyboardInterrupt) else 1)


def _leave_to_torchrun(error: BaseException) -> None:
    """Have the table that torchrun prints at the end show it."""
    with suppress(Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error  # it records the exception that is being handled
        except BaseException as again:
            get_error_handler().record_exception(again)
