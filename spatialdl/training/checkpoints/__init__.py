"""Checkpoints: what a run needs to go on, in whichever layout."""
