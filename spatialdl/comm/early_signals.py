"""Keeps stop signals that arrive before a run can handle them.

SIGTERM and SIGUSR1 kill Python until a handler is installed, and imports take long. A command
calls `keep` before any other import, and the later handler takes the signals that arrived.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_pending: list[signal.Signals] = []


def keep() -> None:
    """Keep `STOPPING` signals until `take`."""
    for number in STOPPING:
        signal.signal(number, _note)


def take() -> list[signal.Signals]:
    """Remove and return the signals that arrived since the last call, in order."""
    taken = _pending[:]
    _pending.clear()
    return taken


class Stopped(KeyboardInterrupt):
    """A signal that ends this process before it has anything to save.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number


def let_end() -> None:
    """Have SIGINT and SIGTERM raise `Stopped`, also those that arrived before."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (_note, signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _stop)
    for number in _pending:
        if number != signal.SIGUSR1:
            raise Stopped(number)


def _stop(number: int, frame: FrameType | None) -> None:
    _note(number, frame)  # for what starts next, if a callback of a library drops the exception
    raise Stopped(number)


def _note(number: int, _frame: FrameType | None) -> None:
    if number != signal.SIGUSR1 and "SPATIALDL_ROLL_CALL" in os.environ:
        os._exit(128 + number)  # a rank, for which the process that started it speaks
    _pending.append(signal.Signals(number))
