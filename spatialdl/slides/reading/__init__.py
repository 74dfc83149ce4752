"""Slides as pixels: any box at any resolution."""
