"""Runs that look for what is wrong: ``debug=overfit``, ``detect_nan``."""
