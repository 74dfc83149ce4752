"""Contexts of forwards and backwards: random numbers and statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.batch_norm import Sharing
from spatialdl.pipeline.stage_runtime import Microbatch, StageRuntime
from spatialdl.random import keyed


class StepContext:
    """Contexts of one rank's steps; all ranks of a pipeline begin and end steps together.

    Random numbers and statistics match a single process that accumulates over the slices of a
    batch: micro-batch by micro-batch, replica by replica within it.

    Args:
        sharing: of the state that forwards update.
        placement: of the pipeline.
        replica: of this rank.
        seed: of the random numbers that the network draws.
    """

    def __init__(self, sharing: Sharing, placement: Placement, replica: int, seed: int) -> None:
        self._sharing, self._data, self._replica = sharing, placement.data, replica
        self._seed, self._step = seed, 0

    def begin(self, microbatches: Sequence[Microbatch], step: int) -> None:
        """Begin the step numbered `step`, from 0."""
        self._step = step
        self._sharing.begin(microbatches)

    @contextmanager
    def forward(self, placed: StageRuntime, number: int, microbatch: Microbatch) -> Iterator[None]:
        """Context of a stage's forward of a micro-batch."""
        piece = number * self._data + self._replica
        if microbatch.size is not None:  # a replica has at most one image, in any micro-batch
            piece = microbatch.place
        own = placed.own(microbatch.samples)
        divided = own if len(own) < microbatch.samples else None
        with (
            keyed(self._seed, self._step, piece, divided),
            self._sharing.slice_of(placed, number),
        ):
            yield

    def backward(self, placed: StageRuntime, number: int) -> AbstractContextManager[None]:
        """Context of a stage's backward of a micro-batch."""
        return self._sharing.slice_of(placed, number)

    def end(self, microbatches: int) -> None:
        """Fold the updates of the step's slices into running statistics and other buffers."""
        self._sharing.fold(microbatches)
