"""Tissue detection, tissue masks, and annotated regions of slides."""
