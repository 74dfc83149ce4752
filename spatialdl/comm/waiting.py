"""Records what each thread of this process waits for, for hang reports.

No clock is read: each record has a number, and a number that is unchanged at the next poll means
that the thread still waits. The position in the code is looked up only then. See `comm.watchdog`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple, TypeVar, TypeVarTuple, cast

Item = TypeVar("Item")
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

Ranks = Sequence[int] | Callable[[], Sequence[int]] | None
"""Ranks of the world; or a function that returns them on demand; None if not communication."""

_Note = tuple[int, object, Ranks, "_Note | None"]

_numbers = count(1)
_notes: dict[int, _Note | None] = {}
_UNINFORMATIVE = ("threading.py", "waiting.py", "queue.py", "trace.py")


class _Place:
    text = doing = ""


def noted(
    what: object, ranks: Ranks, do: Callable[[*Arguments], Result], *arguments: *Arguments
) -> Result:
    """Run a blocking call and record it for hang reports; records may be nested.

    Args:
        what: the operation, with its direction; converted by ``str`` only for a report.
        ranks: ranks that take part; may include this one.
        do: the call, with `arguments`.
    """
    thread = get_ident()
    outer = _notes.get(thread)
    _notes[thread] = (next(_numbers), what, ranks, outer)
    try:
        return do(*arguments)
    finally:
        _notes[thread] = outer


def each(what: str, items: Iterable[Item]) -> Iterator[Item]:
    """Iterate over `items`; each ``next`` is recorded, as a wait without communication."""
    iterator, end = iter(items), object()
    while True:
        item = noted(what, None, next, iterator, end)
        if item is end:
            return
        yield cast("Item", item)


def at(place: str) -> None:
    """Set the position of this process in the program, such as ``step 3``."""
    _Place.text, _Place.doing = place, ""


def doing(what: str) -> None:
    """Add a detail to the position, until the next `at`."""
    _Place.doing = what


def place() -> str:
    """Position set last; empty if there is none."""
    return ", ".join(filter(None, (_Place.text, _Place.doing)))


class Wait(NamedTuple):
    """Wait of a thread.

    Attributes:
        number: differs for each wait.
        what: operations, outermost first.
        ranks: world ranks of the innermost operation that has some; empty if no communication.
        limit_s: ``timeout_s`` of the innermost operation that has one; else infinite.
    """

    number: int
    what: tuple[str, ...]
    ranks: tuple[int, ...]
    limit_s: float = math.inf


def numbers() -> dict[int, int]:
    """Number of the current wait of each waiting thread."""
    return {thread: note[0] for thread, note in list(_notes.items()) if note is not None}


def wait_of(thread: int) -> Wait | None:
    """Current wait of a thread, None if there is none."""
    note = _notes.get(thread)
    if note is None:
        return None
    number, _, ranks, _ = note
    texts, limits = [], []
    while note is not None:
        texts.append(str(note[1]))
        limits.append(getattr(note[1], "timeout_s", None))
        ranks = note[2] if ranks is None else ranks
        note = note[3]
    world_ranks = ranks() if callable(ranks) else ranks
    limit_s = next((limit for limit in limits if limit is not None), math.inf)
    return Wait(number, tuple(dict.fromkeys(reversed(texts))), tuple(world_ranks or ()), limit_s)


def _frames(thread: int) -> Iterator[FrameType]:
    """Frames of a thread, innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_of(thread: int) -> str:
    """ "package/file.py:12 in function" of the innermost informative frame."""
    frames = list(_frames(thread))
    for frame in frames:
        path = Path(frame.f_code.co_filename)
        if path.name not in _UNINFORMATIVE:
            return f"{'/'.join(path.parts[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}"
    return "no Python frame"


def module_of(thread: int) -> str:
    """Module whose forward a thread executes, as named by ``named_modules``; else empty."""
    torch_nn = sys.modules.get("torch.nn")
    if torch_nn is None:
        return ""
    modules: list[Any] = []
    for frame in _frames(thread):
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(owner, torch_nn.Module) and owner not in modules:
            modules.insert(0, owner)
    if not modules:
        return ""
    root, module = modules[0], modules[-1]
    name = next((name for name, child in root.named_modules() if child is module), "")
    kind = type(module).__name__
    return f"module {name} ({kind})" if name else kind
