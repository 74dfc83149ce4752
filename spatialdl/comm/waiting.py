"""What each thread of this process waits for, noted where it waits, so that a hang can be told.

Nobody reads a clock: a note has a number, and whoever looks twice and sees the same one knows that
the thread waits still. Where a thread is in its code is looked up only then. See `comm.watchdog`.
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
"""Of the world; or what tells them when somebody asks; None for what is no communication."""

_Note = tuple[int, object, Ranks, "_Note | None"]

_numbers = count(1)
_notes: dict[int, _Note | None] = {}
_OF_NO_USE = ("threading.py", "waiting.py", "queue.py", "trace.py")


class _Place:
    text = doing = ""


def noted(
    what: object, ranks: Ranks, do: Callable[[*Arguments], Result], *arguments: *Arguments
) -> Result:
    """Do what may wait, and return its result; notes within each other make it more exact.

    Args:
        what: is done, with its direction; its ``str`` is taken only when it is told.
        ranks: among which; this one may be among them.
        do: is called with `arguments`.
    """
    thread = get_ident()
    outer = _notes.get(thread)
    _notes[thread] = (next(_numbers), what, ranks, outer)
    try:
        return do(*arguments)
    finally:
        _notes[thread] = outer


def each(what: str, items: Iterable[Item]) -> Iterator[Item]:
    """The items; what it takes to get each of them is noted, as no communication."""
    iterator, end = iter(items), object()
    while True:
        item = noted(what, None, next, iterator, end)
        if item is end:
            return
        yield cast("Item", item)


def at(place: str) -> None:
    """From now on this process is at this place, such as ``step 3``."""
    _Place.text, _Place.doing = place, ""


def doing(what: str) -> None:
    """More about the place, until the next `at`."""
    _Place.doing = what


def place() -> str:
    """Where this process said last that it is; empty if it has not."""
    return ", ".join(filter(None, (_Place.text, _Place.doing)))


class Wait(NamedTuple):
    """What a thread is in.

    Attributes:
        number: another one for each wait.
        what: from the widest to the closest.
        ranks: of the world, of the closest that names some; none if it is no communication.
        limit_s: seconds that it may take, of the closest that has a ``timeout_s``; else infinite.
    """

    number: int
    what: tuple[str, ...]
    ranks: tuple[int, ...]
    limit_s: float = math.inf


def numbers() -> dict[int, int]:
    """By thread the number of what it is in, of those that are in something."""
    return {thread: note[0] for thread, note in list(_notes.items()) if note is not None}


def wait_of(thread: int) -> Wait | None:
    """What a thread is in, None if in nothing."""
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
    found = ranks() if callable(ranks) else ranks
    limit_s = next((one for one in limits if one is not None), math.inf)
    return Wait(number, tuple(dict.fromkeys(reversed(texts))), tuple(found or ()), limit_s)


def _frames(thread: int) -> Iterator[FrameType]:
    """From the closest outwards."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_of(thread: int) -> str:
    """ "package/file.py:12 in function": the closest that tells something."""
    frames = list(_frames(thread))
    for frame in frames:
        path = Path(frame.f_code.co_filename)
        if path.name not in _OF_NO_USE:
            return f"{'/'.join(path.parts[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}"
    return "no place in Python"


def module_of(thread: int) -> str:
    """The module of a network whose forward it is in, as ``named_modules`` calls it; or nothing."""
    torch_nn = sys.modules.get("torch.nn")
    if torch_nn is None:
        return ""
    modules: list[Any] = []
    for frame in _frames(thread):
        one = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(one, torch_nn.Module) and one not in modules:
            modules.insert(0, one)
    if not modules:
        return ""
    root, module = modules[0], modules[-1]
    name = next((name for name, one in root.named_modules() if one is module), "")
    kind = type(module).__name__
    return f"module {name} ({kind})" if name else kind
