"""Slides: reading them, finding tissue, cutting tiles, and drawing slides to try things on."""
