"""What a step does that costs time beside arithmetic, and which lines of the package cause it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import spatialdl

PACKAGE = f"{Path(spatialdl.__file__).parent}/"
_AROUND = ("comm/waiting.py", "comm/check.py", "comm/replay.py", "random/drawing.py")
KINDS = ("waits", "d2h", "h2d", "messages", "collectives", "objects", "launches")


class Place(NamedTuple):
    """Lines of the package, as ``file:line function``.

    Attributes:
        asks: the innermost one outside of ``comm/``, on whose behalf it happens.
        does: the innermost one.
    """

    asks: str
    does: str


@dataclass
class Ledger:
    """Events by kind and place, and their bytes by kind.

    Kinds: ``waits`` of the host for the device; ``d2h`` and ``h2d`` copies; ``messages`` that are
    sent to a peer, ``collectives`` of tensors, and ``objects`` that are pickled; ``launches`` of
    operators on the device that compute something.
    """

    is_on: bool = False
    events: dict[str, Counter[Place]] = field(
        default_factory=lambda: {kind: Counter() for kind in KINDS}
    )
    bytes: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, size: int = 0) -> None:
        """Count an event, of so many bytes, where it happens now."""
        if self.is_on:
            self.events[kind][_place()] += 1
            self.bytes[kind] += size

    def totals(self) -> dict[str, int]:
        return {kind: places.total() for kind, places in self.events.items()}


def most(ledgers: Sequence[Ledger]) -> Ledger:
    """Of each kind the events, and the bytes, of the rank that has the most of them."""
    return Ledger(
        events={
            kind: max((one.events[kind] for one in ledgers), key=Counter.total) for kind in KINDS
        },
        bytes=Counter({kind: max(one.bytes[kind] for one in ledgers) for kind in KINDS}),
    )


def _place() -> Place:
    frame, does = sys._getframe(2), ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            file = code.co_filename.removeprefix(PACKAGE)
            here = f"{file}:{frame.f_lineno} {code.co_name}"
            if file not in _AROUND:
                does = does or here
                if not file.startswith("comm/"):
                    return Place(here, does)
        frame = frame.f_back  # type: ignore[assignment]
    return Place(does or "PyTorch", does or "PyTorch")
