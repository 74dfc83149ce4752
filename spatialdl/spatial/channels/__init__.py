"""Tensor parallelism: channels of weights and activations divided over the tensor axis."""
