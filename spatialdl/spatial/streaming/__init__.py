"""Runs images larger than a device: virtual ranks in turn, with tensors offloaded to a store."""
