"""Contexts of forwards and backwards: random numbers, statistics, deferred weight gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.action import Action, describe
from spatialdl.pipeline.batch_norm import Sharing
from spatialdl.pipeline.stage_runtime import Microbatch, StageRuntime
from spatialdl.random import keyed
from spatialdl.spatial.deferred_gradients import DeferredGradients
from spatialdl.spatial.deferred_layers import DeferWeightGradients


class StepContext:
    """Contexts of one rank's steps; all ranks of a pipeline begin and end steps together.

    Random numbers and statistics match a single process that accumulates over the slices of a
    batch: micro-batch by micro-batch, replica by replica within it.

    Args:
        sharing: of the state that forwards update.
        placement: of the pipeline.
        replica: of this rank.
        seed: of the random numbers that the network draws.
        defer_weights: whether backwards defer weight gradients to weight actions.
    """

    def __init__(
        self, sharing: Sharing, placement: Placement, replica: int, seed: int, defer_weights: bool
    ) -> None:
        self._sharing, self._data, self._replica = sharing, placement.data, replica
        self._seed, self._step, self._defer_weights = seed, 0, defer_weights
        self._deferred: dict[Action, DeferredGradients] = {}

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
            DeferWeightGradients() if self._defer_weights else nullcontext(),
            keyed(self._seed, self._step, piece, divided),
            self._sharing.slice_of(placed, number),
        ):
            yield

    @contextmanager
    def backward(self, placed: StageRuntime, action: Action) -> Iterator[None]:
        """Context of a backward; defers weight gradients if there are weight actions."""
        with self._sharing.slice_of(placed, action.microbatch):
            if not self._defer_weights:
                yield
                return
            deferred = self._deferred[action._replace(kind="weight")] = DeferredGradients()
            with deferred.gather(), DeferWeightGradients():
                yield

    def add_weights(self, action: Action) -> None:
        """Run a weight action."""
        self._deferred.pop(action).add_all()

    def end(self, microbatches: int) -> None:
        """Fold the updates of the step's slices into running statistics and other buffers."""
        self._sharing.fold(microbatches)


def defers_weight_gradients(actions: Sequence[Action]) -> bool:
    """Whether backwards defer weight gradients to weight actions.

    Raises:
        ValueError: if only some backwards have a weight action.
    """
    weights = {action._replace(kind="backward") for action in actions if action.kind == "weight"}
    left = [a for a in actions if a.kind == "backward" and a not in weights]
    if weights and left:
        raise ValueError(
            f"the schedule leaves the weights of {', '.join(map(describe, left))} without "
            "gradients: a schedule with weight actions must have one for every backward"
        )
    return bool(weights)
