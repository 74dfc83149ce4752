"""What the fork server of the reading processes imports, once, before it forks them.

Nothing else may import it: it keeps this process and its children from ever starting MPI, whatever
the program imports that they belong to. They are no ranks, though their environment says so.
"""

from __future__ import annotations

import signal

import mpi4py

import spatialdl.data.shards
import spatialdl.data.synthetic_masks
import spatialdl.data.workers  # noqa: F401

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

# Sent by launchers to everybody, and who reads must go on until the run has written its checkpoint.
# SIGTERM is kept for `workers._begin`: the parent may have sent it before its process was ready.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
