"""Readers of volume formats, which open files as `StoredVolume`."""
