"""``comm.timeout``: how long a rank may wait for other ranks. Imports no PyTorch."""

from __future__ import annotations

import math
from datetime import timedelta

LATER_S = 60.0
"""Margin that timeouts of other libraries get, so that this watchdog reports first."""


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


def is_set() -> bool:
    """Whether a limit, or none, was set explicitly."""
    return _Limit.is_set


def setting(key: str, value: object) -> str:
    """How the user sets a key: ``comm.check=true``, or ``init_mesh(check=True)``."""
    if _Limit.by_command:
        return f"comm.{key}={str(value).lower() if isinstance(value, bool) else value}"
    return f"init_mesh({key}={value})"


def seconds() -> float | None:
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
