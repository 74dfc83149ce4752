"""Staging: copies of shards on a disk of the node for the duration of a job.

One process per node copies them (`copier`), while the ranks read missing shards from the source
(`spatialdl.data.open_shards`). The copies are in a folder of the user, named by their checksums, so
that jobs share them (`cache`).
"""
