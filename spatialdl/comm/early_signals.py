"""Keeps stop signals that arrive before a run can handle them.

SIGTERM and SIGUSR1 kill Python until a handler is installed, and imports take long. A command
calls `keep` before any other import, and the later handler takes the signals that arrived.
"""

from __future__ import annotations

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


def let_end() -> None:
    """Restore default handling of SIGINT and SIGTERM, and raise those already kept."""
    if signal.getsignal(signal.SIGTERM) is not _note:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in take():
        if number == signal.SIGUSR1:
            _pending.append(number)
        else:
            signal.raise_signal(number)


def _note(number: int, _frame: FrameType | None) -> None:
    _pending.append(signal.Signals(number))
