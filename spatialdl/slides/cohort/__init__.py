"""Slides of many patients: their splits, and what is in two of them."""
