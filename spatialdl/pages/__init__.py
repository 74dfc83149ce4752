"""Pages for the browser: what all of them have in common."""
