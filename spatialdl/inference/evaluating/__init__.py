"""Predictions compared with labels: metrics with intervals, pictures, worst cases, a report."""
