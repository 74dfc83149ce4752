"""Runs as jobs of Slurm: what they ask for, handing them in, and what goes on inside."""
