"""What keeps the ranks of a user's program from waiting for each other for ever.

Commands have the same watchdog and end their ranks in the same way, see `starting`.
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
    """Set how long ranks may wait; ``default`` keeps what was set before."""
    if timeout != "default":
        limit.limit_waits(timeout, by_command=False)
    elif not limit.is_set():
        limit.limit_waits(DEFAULT_S, by_command=False)


def check_same_arguments(
    world: Communicator, function: str, arguments: Mapping[str, object]
) -> None:
    """Compare what ranks have called a function with; all must call it.

    Raises:
        ValueError: on all ranks, if it is not the same.
    """
    for rank, other in enumerate(world.allgather(dict(arguments))):
        for name, value in arguments.items():
            if other[name] != value:
                raise ValueError(
                    f"ranks call {function} with different arguments: {name}={value} on rank "
                    f"{world.rank}, {name}={other[name]} on rank {rank}: give all the same"
                )


def protect(world: Communicator, timeout: Timeout, check: bool | None) -> None:
    """End all ranks together from now on; all of `world` must call it.

    Args:
        world: the ranks of a mesh; waits are watched if these are all that were started.
        check: switches the comparison of communications on or off, None leaves it.
    """
    if check is not None:
        comm_check.enable(check)
    if world.size == 1:
        return
    end_job_on_errors()
    everybody = all_ranks()
    if everybody.size == world.size:
        limit_program(timeout)
        start_watchdog(everybody)
