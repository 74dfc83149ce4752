"""Checks that all ranks were started with the same code, packages, configuration and data."""
