"""Predictions for slides and data sets by a network from a checkpoint, in any layout."""
