"""HTML report of a training run."""
