"""Start of the commands: from a command line to the first line of their work.

::

    command line -> checks -> in this process alone
                           |- under a launcher (mpiexec, srun, torchrun): as one of its ranks
                           |- as the process that launches ranks and passes on what they say
                           '- as a Slurm job, which runs the same command on its nodes

Checks come first: a mistake is told before ranks exist, once, by the process that a user started.

`start.py` has these ways, `prediction.py` what predict and evaluate share, `rank_state.py` what
must be the same on all ranks (code, packages, configuration, data), `slurm_runs.py` and
`slurm_job.py` the submission and the script inside of a job.
"""
