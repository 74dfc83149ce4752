"""Slides of many patients: their table, their splits, what is in two of them, their page."""
