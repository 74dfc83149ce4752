"""The Hydra configuration of `python -m spatialdl.train`, one folder a group."""
