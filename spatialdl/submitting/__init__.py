"""Runs as Slurm jobs: resources, submission, and the script inside the job."""
