"""What a rank says of its wait, looked at while another one does not come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread, get_ident

from mpi4py import MPI

from spatialdl.comm.waiting import Wait, wait_of

RANK, LAST = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size - 1


def told_by_the_first(tmp_path: Path, what: str, do: Callable[[], object]) -> Wait | None:
    """All ranks do something, the last one not before the first is seen to wait in `what`.

    Returns:
        What the first rank waits for; None on others.
    """
    seen = Path(MPI.COMM_WORLD.bcast(str(tmp_path))) / "seen"
    if RANK == LAST:
        while not seen.exists():
            pass
    if RANK > 0:
        do()
        return None
    found: list[Wait] = []
    over, thread = Event(), get_ident()

    def look() -> None:
        while not over.is_set():
            wait = wait_of(thread)
            if wait is not None and any(what in one for one in wait.what):
                found.append(wait)
                seen.touch()
                return

    looking = Thread(target=look)
    looking.start()
    try:
        do()
    finally:
        over.set()
        looking.join()
    return found[0]
