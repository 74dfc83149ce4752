"""Aborting a job from one of its ranks."""

from __future__ import annotations

import os
import sys
import threading
import time

from spatialdl.comm.liveness import report_exit

_SURELY_S = 10.0
_RELAYED_S = 0.2  # or launchers print their messages between the output of ranks


def end_job(code: int) -> None:
    """Exit at once with all ranks of the MPI world, if it has several."""
    report_exit()
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    running = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    if mpi is not None and running and mpi.COMM_WORLD.size > 1:
        time.sleep(_RELAYED_S)
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)


def end_job_for_sure() -> None:
    """`end_job`, even if MPI is stuck."""
    threading.Thread(target=end_job, args=(1,), daemon=True).start()
    time.sleep(_SURELY_S)
    os._exit(1)
