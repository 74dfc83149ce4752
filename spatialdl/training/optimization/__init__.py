"""Optimizers, learning-rate schedulers, precision, weight averages and the update."""
