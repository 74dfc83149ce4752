"""``comm.timeout``: how long a rank may wait for others. No PyTorch here."""

from __future__ import annotations

import math
from datetime import timedelta

LATER_S = 60.0
"""Libraries with timeouts of their own end the job only so much later."""


class _Limit:
    seconds: float | None = None
    is_set = False


def check_timeout(value: object) -> None:
    """Look at ``comm.timeout``.

    Raises:
        ValueError: it is not seconds, nor null.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= float(value) < math.inf):  # type: ignore[arg-type]
        raise ValueError(
            f"comm.timeout={value} must be seconds that a rank may wait for others, or null to "
            "wait for ever"
        )


def limit_waits(seconds: float | None) -> None:
    """Set the limit of this process, before it talks to others; None or 0 for none."""
    _Limit.seconds, _Limit.is_set = seconds or None, True


def seconds() -> float | None:
    """The limit of this process, None for none."""
    return _Limit.seconds


def timeout_of_groups() -> timedelta | None:
    """That torch.distributed gets, so that this watchdog speaks first; None for its own."""
    if not _Limit.is_set:
        return None
    if _Limit.seconds is None:
        return timedelta(days=365)
    return timedelta(seconds=_Limit.seconds + LATER_S)
