"""The `mpi4py` backend of torch.distributed: stock wheels over any MPI.

Importing this package registers it. Then a program launched by mpiexec or srun calls

    torch.distributed.init_process_group("mpi4py")

without further settings: ranks and rendezvous store come from MPI. GPU tensors are staged through
host memory.

Until `destroy_process_group` an uncaught exception on one rank aborts the job, and a process that
exits first completes its pending operations: otherwise its peers would hang or crash in
MPI_Finalize.
"""

from spatialdl.comm.backend.registration import register

register()
