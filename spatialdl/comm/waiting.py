"""What each thread of this process waits for, for hang reports, and how long it may: the limit.

Imports no PyTorch. No clock is read: each record has a number, and a number that is unchanged at
the next poll means that the thread still waits. The position in the code is looked up only then.
See `comm.watchdog`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeVar, TypeVarTuple, cast

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
    """

    number: int
    what: tuple[str, ...]
    ranks: tuple[int, ...]


def numbers() -> dict[int, int]:
    """Number of the current wait of each waiting thread."""
    return {thread: note[0] for thread, note in list(_notes.items()) if note is not None}


def wait_of(thread: int) -> Wait | None:
    """Current wait of a thread, None if there is none."""
    note = _notes.get(thread)
    if note is None:
        return None
    number, _, ranks, _ = note
    texts = []
    while note is not None:
        texts.append(str(note[1]))
        ranks = note[2] if ranks is None else ranks
        note = note[3]
    world_ranks = ranks() if callable(ranks) else ranks
    return Wait(number, tuple(dict.fromkeys(reversed(texts))), tuple(world_ranks or ()))


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


# --- the limit: ``comm.timeout``, or an argument of `init_mesh`

DEFAULT_S = 1800.0
"""As of torch.distributed over gloo, and of ``comm.timeout``."""
LATER_S = 60.0
"""Margin that timeouts of other libraries get, so that this watchdog reports first."""

Timeout = float | Literal["default"] | None


class _Limit:
    seconds: float | None = None
    is_set = False
    by_command = False


def check_timeout(value: object, by_command: bool = True) -> None:
    """Check ``comm.timeout``, or the argument of ``init_mesh``.

    Raises:
        ValueError: if it is neither a number of seconds nor null.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= float(value) < math.inf):  # type: ignore[arg-type]
        raise ValueError(
            f"{'comm.timeout' if by_command else 'timeout'}={value} must be the seconds that a "
            f"rank may wait for other ranks, or {'null' if by_command else 'None'} for no limit"
        )


def limit_waits(seconds: float | None, by_command: bool = True) -> None:
    """Set the limit of this process before its first communication; None or 0 for none.

    Args:
        by_command: whether it is a key of a command; else an argument of ``init_mesh``.
    """
    _Limit.seconds, _Limit.is_set, _Limit.by_command = seconds or None, True, by_command


def limit_program(timeout: Timeout) -> None:
    """Set the limit of a user's program; ``default`` keeps an earlier value."""
    if timeout != "default":
        limit_waits(timeout, by_command=False)
    elif not _Limit.is_set:
        limit_waits(DEFAULT_S, by_command=False)


def setting(key: str, value: object) -> str:
    """How the user sets a key: ``comm.check=true``, or ``init_mesh(check=True)``."""
    if _Limit.by_command:
        return f"comm.{key}={str(value).lower() if isinstance(value, bool) else value}"
    return f"init_mesh({key}={value})"


def limit_seconds() -> float | None:
    """Limit of this process, None for none."""
    return _Limit.seconds


def how_to_raise() -> str:
    """Name of the limit, and the value for no limit."""
    return (
        "comm.timeout, null for no limit"
        if _Limit.by_command
        else "init_mesh(timeout=), None for no limit"
    )


def timeout_of_groups() -> timedelta | None:
    """Timeout for torch.distributed, above this limit; None for its own default."""
    if not _Limit.is_set:
        return None
    if _Limit.seconds is None:
        return timedelta(days=365)
    return timedelta(seconds=_Limit.seconds + LATER_S)
