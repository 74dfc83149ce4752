"""Checkpoints, independent of the layout that writes or resumes them."""
