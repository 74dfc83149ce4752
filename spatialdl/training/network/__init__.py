"""The network of a run: built, weights loaded, parts frozen."""
