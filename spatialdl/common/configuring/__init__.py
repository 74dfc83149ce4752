"""Command line: configuration keys, help and checks of overrides."""
