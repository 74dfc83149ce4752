"""Many slides: what is asked of them, the work shared out, what became of it."""
