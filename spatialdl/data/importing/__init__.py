"""Images and patches of other programs as data sets."""
