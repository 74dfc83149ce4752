"""Starting MPI in a rank, which importing ``mpi4py.MPI`` does."""

from __future__ import annotations

import sys
import time

from spatialdl.comm.launch import close_to_others

_HEAD_START_S = 0.25


def initialise_mpi() -> None:
    """Initialise MPI; all ranks will have done so before one of them is sent anything.

    Open MPI 5.0 crashes in a rank to which a message comes while it still waits in ``MPI_Init`` for
    the others to get there (github.com/open-mpi/ompi/issues/12495). There is nothing by which they
    could meet before, so the first message waits a moment.
    """
    if "mpi4py.MPI" in sys.modules:
        return
    close_to_others()
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1 and MPI.get_vendor()[0] == "Open MPI":
        time.sleep(_HEAD_START_S)
