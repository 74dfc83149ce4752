"""Volumes of other programs: a reader for each format, which opens files as `StoredVolume`."""
