"""The command line: keys, their help, and words that no configuration knows."""
