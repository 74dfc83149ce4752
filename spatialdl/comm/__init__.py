"""Communication between ranks: repartition, sums, hand-over; launching; ranks that fail.

Read in this order:

    boxed, plan, repartition    what moves: boxes of tensors, from ranks that own to ranks that need
    communicator                what a transport does; mpi, distributed, virtual, dry
    exchange, reduce            exchanges and sums, and what happens around each of them
    mesh, gradients, handover   ranks with a place in a layout; averages; messages between stages
    launch, world               how a process finds out that it is a rank, and starts others
    check, agreement            whether ranks call the same, and have the same state

Ranks that fail
---------------
A rank that dies or waits for ever would leave all others waiting. In the order in which they act:

    early_signals     keeps stop signals from the first line of a command on, until its handlers run
    launch            starts ranks, forwards signals, kills what is left `GRACE_S` after one
    liveness          ranks report to the process that starts them, which sees the first one die
    waiting           records what each thread waits for, and holds the limit (``comm.timeout``)
    check             refuses a message of unexpected size: ranks call different operations
    watchdog          a rank that waits longer than the limit has all ranks report, and one aborts
    abort             an uncaught exception on one rank aborts all, named once, the cause last
    ending            MPI_Abort, or an exit if MPI is stuck; the reason is added to the run's log
    launcher_output   holds back the launcher's banners, which are shown if no rank has said why

What a rank says last goes to the starting process over a socket, and is printed when all have
ended. Without such a process (mpiexec, srun, torchrun) each rank prints it itself.
"""
