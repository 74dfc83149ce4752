"""Data: sharded sets of images, written once, read by boxes."""

from __future__ import annotations

from .shards import ShardDataset
from .writer import ShardWriter

__all__ = ["ShardDataset", "ShardWriter"]
