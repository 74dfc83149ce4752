"""Channels divided over the tensor axis: weights and activations of which each rank has a part."""
