"""Benchmarks: ``python -m spatialdl.bench NAME`` prints a table, writes JSON and a picture."""
