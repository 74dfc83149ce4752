"""Which parts of a slide are taken, and what is done to them."""
