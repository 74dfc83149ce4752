"""Benchmarks: ``python -m spatialdl.bench NAME`` prints a table, and writes JSON and a picture."""
