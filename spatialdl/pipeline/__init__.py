"""Cuts networks into stages, and runs them by schedules."""
