"""Tasks: losses, metrics and predictions."""
