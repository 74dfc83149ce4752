"""Keeps the ranks of a user's program from hanging after a failure.

Commands use the same watchdog and abort in the same way, see `starting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from spatialdl.comm import check as comm_check
from spatialdl.comm import limit
from spatialdl.comm.abort import end_job_on_errors
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.watchdog import start_watchdog
from spatialdl.comm.world import world as all_ranks

DEFAULT_S = 1800.0
"""As of torch.distributed over gloo, and of ``comm.timeout``."""

Timeout = float | Literal["default"] | None


def limit_program(timeout: Timeout) -> None:
    """Set how long ranks may wait; ``default`` keeps an earlier value."""
    if timeout != "default":
        limit.limit_waits(timeout, by_command=False)
    elif not limit.is_set():
        limit.limit_waits(DEFAULT_S, by_command=False)


def check_same_arguments(
    world: Communicator, function: str, arguments: Mapping[str, object]
) -> None:
    """Check that ranks call a function with the same arguments; collective.

    Raises:
        ValueError: on all ranks, if arguments differ.
    """
    for rank, other in enumerate(world.allgather(dict(arguments))):
        for name, value in arguments.items():
            if other[name] != value:
                raise ValueError(
                    f"ranks call {function} with different arguments: {name}={value} on rank "
                    f"{world.rank}, {name}={other[name]} on rank {rank}: use the same on all ranks"
                )


def protect(world: Communicator, timeout: Timeout, check: bool | None) -> None:
    """Abort all ranks together from now on; collective over `world`.

    Args:
        world: ranks of a mesh; waits are watched only if it contains all launched ranks.
        check: enables or disables the comparison of communications, None leaves it unchanged.
    """
    if check is not None:
        comm_check.enable(check)
    if world.size == 1:
        return
    end_job_on_errors()
    launched_ranks = all_ranks()
    if launched_ranks.size == world.size:
        limit_program(timeout)
        start_watchdog(launched_ranks)
