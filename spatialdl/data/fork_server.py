"""First import of the fork server, before it forks worker processes.

Only the fork server may import this module: it prevents MPI from being initialised in this process
and its children, whatever modules their program imports. They are not ranks, although they inherit
the environment of one. A program has a single fork server, shared by all that need one.
"""

from __future__ import annotations

import signal

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

# Launchers send SIGUSR1 to all processes, and readers must run until the checkpoint is written.
# SIGTERM stays pending for the children: their parent may send it before they are ready.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
