"""Checks of a network: a dry run for a layout, and a comparison with a single process."""
