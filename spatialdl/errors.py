"""The exceptions that are ours; everything else is Python's own."""

from __future__ import annotations


class UnsupportedSpatialOp(NotImplementedError):
    """An operation that cannot be done on a split image; nothing was computed."""


class CommMismatch(RuntimeError):
    """Ranks were about to talk about different things (found by ``comm.check``)."""


class SlideError(ValueError):
    """A slide cannot be used: missing, unreadable, or without what tiling needs."""


class ShardError(ValueError):
    """A data set folder or one of its shards is missing, damaged or of another kind."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another run."""


class NotFinite(ArithmeticError):
    """A number became NaN or infinite in training (see ``trainer.stop_on_nan``)."""
