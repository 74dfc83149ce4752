"""Boxes, layouts and placements of ranks, in integer arithmetic."""
