"""Batches of slides: options, scheduling of the work, records and reports."""
