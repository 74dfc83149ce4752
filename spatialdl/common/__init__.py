"""Configuration keys, pages, columns of text: what every room may import."""
