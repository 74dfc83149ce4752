"""Hydra looks for plugins in this place only; see spatialdl/submitting."""
