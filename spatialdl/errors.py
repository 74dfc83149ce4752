"""Exceptions of this package."""

from __future__ import annotations


class UnsupportedSpatialOp(NotImplementedError):
    """An operation is not supported on a split image; nothing was computed."""


class CommMismatch(RuntimeError):
    """Ranks called different operations (detected by ``comm.check``)."""


class MpiNotFound(ImportError):
    """No MPI library can be loaded."""


class SlideError(ValueError):
    """A slide is missing, unreadable, or lacks metadata for tiling."""


class ShardError(ValueError):
    """A data set folder or one of its shards is missing, damaged or of another kind."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another run."""


class NotFinite(ArithmeticError):
    """A value became NaN or infinite in training."""
