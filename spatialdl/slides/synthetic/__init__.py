"""Synthetic slides for demonstrations, benchmarks and tests."""
