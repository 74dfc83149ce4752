"""What a fork server imports first, before it forks processes that read or tile.

Nothing else may import it: it keeps this process and its children from ever starting MPI, whatever
the program imports that they belong to. They are no ranks, though their environment says so.
A program has one fork server, whoever of it starts it.
"""

from __future__ import annotations

import signal

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

# Sent by launchers to everybody, and who reads must go on until the run has written its checkpoint.
# SIGTERM is kept for the processes: their parent may have sent it before they were ready.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
