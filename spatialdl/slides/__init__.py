"""Whole slides: reading, tissue detection, tiling, cohorts, and synthetic slides."""
