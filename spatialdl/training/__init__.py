"""Training loop, its configuration, outputs and checkpoints."""
