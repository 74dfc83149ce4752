"""Data: sharded sets of images, written once, read by boxes."""

from __future__ import annotations

from spatialdl.data.shards import ShardDataset
from spatialdl.data.writer import ShardWriter

__all__ = ["ShardDataset", "ShardWriter"]
