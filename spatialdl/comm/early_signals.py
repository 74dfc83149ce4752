"""Signals that ask a run to stop before it can hear them: they are kept while it starts.

Python dies of SIGTERM and SIGUSR1 until somebody listens, and there is much to import before. So a
command calls `keep` before it imports anything else, and who listens later takes what has come.
"""

from __future__ import annotations

import signal
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_came: list[signal.Signals] = []


def keep() -> None:
    """From now on `STOPPING` do nothing but wait for `take`."""
    for number in STOPPING:
        signal.signal(number, _note)


def take() -> list[signal.Signals]:
    """Those that have come and nobody has taken, in their order."""
    taken = _came[:]
    _came.clear()
    return taken


def let_end() -> None:
    """Let SIGINT and SIGTERM end this process as ever, also one that has been kept."""
    if signal.getsignal(signal.SIGTERM) is not _note:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in take():
        if number == signal.SIGUSR1:
            _came.append(number)
        else:
            signal.raise_signal(number)


def _note(number: int, _frame: FrameType | None) -> None:
    _came.append(signal.Signals(number))
