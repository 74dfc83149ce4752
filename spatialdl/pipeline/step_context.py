"""What surrounds each forward and backward of a step: random numbers, statistics, late weights."""

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
    """That of one rank; all ranks of a pipeline begin and end their steps together.

    Random numbers and statistics are those of one process that accumulates over the slices of a
    batch, micro-batch by micro-batch, within it replica by replica.

    Args:
        sharing: of what forwards update.
        placement: of the pipeline.
        replica: of this rank.
        seed: of the random numbers that the network draws.
        weights_apart: whether backwards leave the gradients of weights to weight actions.
    """

    def __init__(
        self, sharing: Sharing, placement: Placement, replica: int, seed: int, weights_apart: bool
    ) -> None:
        self._sharing, self._data, self._replica = sharing, placement.data, replica
        self._seed, self._step, self._weights_apart = seed, 0, weights_apart
        self._later: dict[Action, DeferredGradients] = {}

    def begin(self, microbatches: Sequence[Microbatch], step: int) -> None:
        """A step begins; `step` others were before."""
        self._step = step
        self._sharing.begin(microbatches)

    @contextmanager
    def forward(self, placed: StageRuntime, number: int, microbatch: Microbatch) -> Iterator[None]:
        """Around the forward of a stage on a micro-batch."""
        piece = number * self._data + self._replica
        if microbatch.size is not None:  # replicas have none or one, in whatever micro-batch
            piece = microbatch.place
        own = placed.own(microbatch.samples)
        some = own if len(own) < microbatch.samples else None
        with (
            DeferWeightGradients() if self._weights_apart else nullcontext(),
            keyed(self._seed, self._step, piece, some),
            self._sharing.slice_of(placed, number),
        ):
            yield

    @contextmanager
    def backward(self, placed: StageRuntime, action: Action) -> Iterator[None]:
        """Around a backward; the gradients of weights wait for a weight action, if there is one."""
        with self._sharing.slice_of(placed, action.microbatch):
            if not self._weights_apart:
                yield
                return
            later = self._later[action._replace(kind="weight")] = DeferredGradients()
            with later.gather(), DeferWeightGradients():
                yield

    def add_weights(self, action: Action) -> None:
        """Carry out a weight action."""
        self._later.pop(action).add_all()

    def end(self, microbatches: int) -> None:
        """Leave what the step's slices come to in running statistics and other buffers.

        Raises:
            UnsupportedSpatialOp: on all ranks, if a forward of the first step changes a parameter.
        """
        self._sharing.fold(microbatches)


def are_weights_apart(actions: Sequence[Action]) -> bool:
    """Whether backwards leave the gradients of weights to weight actions.

    Raises:
        ValueError: if some do, and others do not.
    """
    weights = {action._replace(kind="backward") for action in actions if action.kind == "weight"}
    left = [a for a in actions if a.kind == "backward" and a not in weights]
    if weights and left:
        raise ValueError(
            f"the schedule leaves the weights of {', '.join(map(describe, left))} without "
            "gradients: a schedule with weight actions must have one for every backward"
        )
    return bool(weights)
