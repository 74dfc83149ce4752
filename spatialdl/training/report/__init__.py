"""The report of a run: one page for the browser."""
