"""Slides drawn here, for demonstrations, benchmarks and tests."""
