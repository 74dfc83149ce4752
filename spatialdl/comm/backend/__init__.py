"""The `mpi4py` backend of torch.distributed: stock wheels over any MPI.

Importing this package registers it. Then, in a program that mpiexec or srun starts,

    torch.distributed.init_process_group("mpi4py")

needs nothing else: the ranks, and a store for them, come from MPI. Tensors on a GPU travel through
host memory.

Until `destroy_process_group` an uncaught exception on one rank ends the job on all, and a process
that ends first finishes what it has started: a rank that left otherwise would hang in MPI's
finalisation, or crash there.
"""

from spatialdl.comm.backend.registration import register

register()
