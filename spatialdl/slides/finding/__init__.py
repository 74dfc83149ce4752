"""Where on a slide tissue is, and what was drawn on it."""
