"""Console output of a training run."""
