"""Debug runs: ``debug=overfit``, ``debug=detect_nan``."""
