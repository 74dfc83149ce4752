"""Comparison of a network on split images with a single process."""
