"""``comm.timeout``: how long a rank may wait for others. No PyTorch here."""

from __future__ import annotations

import math
from datetime import timedelta

LATER_S = 60.0
"""Libraries with timeouts of their own end the job only so much later."""


class _Limit:
    seconds: float | None = None
    is_set = False
    by_command = False


def check_timeout(value: object, by_command: bool = True) -> None:
    """Look at ``comm.timeout``, or the argument of ``init_mesh``.

    Raises:
        ValueError: it is not seconds, nor null.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= float(value) < math.inf):  # type: ignore[arg-type]
        raise ValueError(
            f"{'comm.timeout' if by_command else 'timeout'}={value} must be seconds that a rank "
            f"may wait for others, or {'null' if by_command else 'None'} to wait for ever"
        )


def limit_waits(seconds: float | None, by_command: bool = True) -> None:
    """Set the limit of this process, before it talks to others; None or 0 for none.

    Args:
        by_command: whether it is a key of a command; else an argument of ``init_mesh``.
    """
    _Limit.seconds, _Limit.is_set, _Limit.by_command = seconds or None, True, by_command


def is_set() -> bool:
    """Whether there is a limit, or is to be none."""
    return _Limit.is_set


def setting(key: str, value: object) -> str:
    """How the user sets something: ``comm.check=true``, or ``init_mesh(check=True)``."""
    if _Limit.by_command:
        return f"comm.{key}={str(value).lower() if isinstance(value, bool) else value}"
    return f"init_mesh({key}={value})"


def seconds() -> float | None:
    """The limit of this process, None for none."""
    return _Limit.seconds


def how_to_raise() -> str:
    """The name of the limit, and the value that means none."""
    return (
        "comm.timeout, null is for ever"
        if _Limit.by_command
        else "init_mesh(timeout=), None is for ever"
    )


def timeout_of_groups() -> timedelta | None:
    """That torch.distributed gets, so that this watchdog speaks first; None for its own."""
    if not _Limit.is_set:
        return None
    if _Limit.seconds is None:
        return timedelta(days=365)
    return timedelta(seconds=_Limit.seconds + LATER_S)
