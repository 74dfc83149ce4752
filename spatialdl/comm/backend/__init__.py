"""The `mpi4py` backend of torch.distributed: stock wheels over any MPI.

Importing this package registers it. Then a program launched by mpiexec or srun calls

    torch.distributed.init_process_group("mpi4py")

without further settings: ranks and rendezvous store come from MPI. GPU tensors are staged through
host memory.

Until `destroy_process_group` an uncaught exception on one rank aborts the job, and a process that
exits first completes its pending operations: otherwise its peers would hang or crash in
MPI_Finalize.

The modules here import nothing of the rest of spatialdl but private names of PyTorch; what they
need of it is handed over below: how a job ends for sure, and a store for ranks that a launcher has
connected by this MPI.
"""

from datetime import timedelta
from typing import Any

from mpi4py import MPI

from spatialdl.comm.backend import calls
from spatialdl.comm.backend.registration import register
from spatialdl.comm.ending import end_job_for_sure
from spatialdl.comm.launch import check_mpi_world
from spatialdl.comm.store import store_by_mpi


def _make_store(world: MPI.Intracomm, timeout: timedelta) -> Any:
    check_mpi_world(world.size)
    return store_by_mpi(world, timeout)


calls.end_job = end_job_for_sure
register(_make_store)
