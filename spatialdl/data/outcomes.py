"""Commands that process many inputs: keys of results, failures, messages and exit codes.

A result stays valid as long as its key, a digest of its inputs and settings, is the same. Every
input has an outcome: done, skipped with the reason, or failed with the reason. Resuming, summaries,
reports and the exit code follow from these.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor
from types import FrameType
from typing import Protocol

from spatialdl.errors import ShardError, SlideError

OK, FAILED, MISUSED, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
"""Exit codes: success, failed inputs or I/O error, invalid arguments or files, SIGINT, SIGTERM."""

DIED = "the process that worked on it died (killed, perhaps out of memory)"


class Outcome(Protocol):
    """What became of an input."""

    @property
    def failed(self) -> bool:
        """Whether the input, or a part of it, could not be processed."""


class EmptyResultError(ValueError):
    """The inputs are valid, but have no results."""


class _TerminatedError(KeyboardInterrupt):
    """The process received SIGTERM."""


def result_key(content: object, *, sort_keys: bool = True) -> str:
    """Compute the key of a result.

    Args:
        content: everything that determines the result, for JSON; other objects count by `str`.
        sort_keys: whether dicts in another order have the same key.
    """
    text = json.dumps(content, sort_keys=sort_keys, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def failure_reason(source: str, error: Exception) -> str:
    """Return the message of a failed input; prints the traceback of an unexpected error.

    Args:
        source: the input, such as "slide a.svs".
        error: what was raised for it.
    """
    if isinstance(error, SlideError | ShardError):
        return str(error)
    if isinstance(error, BrokenExecutor):
        return f"{source}: {DIED}"
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{source}: {error.strerror or error}{where}"
    traceback.print_exception(error, file=sys.stderr)
    return f"{source}: {type(error).__name__}: {error}"


def exit_code(outcomes: Iterable[Outcome], *, skip_errors: bool) -> int:
    """Return `FAILED` if an input failed and errors are not to be skipped, else `OK`."""
    failed = any(outcome.failed for outcome in outcomes)
    return FAILED if failed and not skip_errors else OK


def reason_of(error: Exception) -> str:
    """What an error says, without the number of one of the system that names no file."""
    reason = "" if getattr(error, "filename", None) else getattr(error, "strerror", "")
    return reason or str(error)


def run_command(
    run: Callable[[], int],
    kept: str = "run the same command again to resume",
    misused: int = MISUSED,
    describe: Callable[[Exception], str] = reason_of,
) -> int:
    """Run a command; errors and signals become a message on stderr and an exit code.

    Args:
        run: returns the exit code.
        kept: what is said after an interruption, unless the exception has a note.
        misused: the exit code after a ValueError.
        describe: returns what is printed of an error.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return run()
    except (ValueError, OSError) as error:
        print(f"error: {describe(error)}", file=sys.stderr)
        return FAILED if isinstance(error, (EmptyResultError, OSError)) else misused
    except KeyboardInterrupt as error:
        print(f"interrupted; {getattr(error, '__notes__', [kept])[-1]}", file=sys.stderr)
        return TERMINATED if isinstance(error, _TerminatedError) else INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _TerminatedError
