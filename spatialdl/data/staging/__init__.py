"""Staging: copies of shards on a disk of the node, for as long as a job runs.

One process a node copies them (`copier`), while the ranks read from the source what has not arrived
(`spatialdl.data.open_shards`). The copies lie in a folder of the user's, under their checksums, so
that jobs share them (`cache`).
"""
