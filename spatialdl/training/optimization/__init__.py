"""Optimizers, learning rates, precision, averages of weights: all that makes an update."""
