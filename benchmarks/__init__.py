"""Benchmarks: ``python -m benchmarks.NAME`` prints a table, and writes it, JSON and a picture."""
