"""A network in the parts in which the planner runs it, without data."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spatialdl.channels.tensor import whole_of
from spatialdl.channels.uses import uses_of
from spatialdl.channels.weights import divide, whole_outputs
from spatialdl.comm.dry import Dry
from spatialdl.pipeline.stage import Stage, values_in
from spatialdl.pipeline.steps import IMAGE, Recording, Value, output_of
from spatialdl.random import keyed
from spatialdl.spatial.shadow import computed_attributes

_META = torch.device("meta")


class DividedStage(NamedTuple):
    """A stage of whose channels each rank of the tensor axis has a part.

    Attributes:
        ranks: over which they are divided.
        first, after: its first part, and the one after its last.
        plan: for names of modules what is divided where that is not to be found out, see
            `channels.uses.Plan`.
    """

    ranks: int
    first: int
    after: int
    plan: tuple[tuple[str, str], ...] = ()


class NetworkParts:
    """The parts of a network in the order in which they run: pieces of a stage, or all of it.

    Args:
        model: on the ``meta`` device.
        stage: all of its steps; None: the network is run as it is, as one part.
        state: parameters and buffers, step by step.

    Attributes:
        names: of the parts.
        starts: the first step of each part, and the number of steps.
        state: parameters and buffers of each part.
        span: the parts that run: all, or those of a stage that is divided.
    """

    def __init__(
        self, model: nn.Module, stage: Stage | None, names: list[str], state: list[list[Tensor]]
    ) -> None:
        self._model, self._stage = model, stage
        self.pieces = [list(range(len(state)))] if stage is None else stage.parts
        self.names = ["" if stage is None else names[piece[0]] for piece in self.pieces]
        self.starts = [piece[0] for piece in self.pieces] + [len(state)]
        self.state = [[one for step in piece for one in state[step]] for piece in self.pieces]
        self.span = range(len(self.pieces))

    @property
    def is_recorded(self) -> bool:
        return self._stage is not None

    @property
    def dtype(self) -> torch.dtype:
        """Of the images."""
        return next((p.dtype for p in self._model.parameters()), torch.get_default_dtype())

    def uses(self, recording: Recording | None) -> dict[Value, list[int]]:
        """The parts that take a value, in order; what the network returns is taken after all."""
        found: dict[Value, list[int]] = {}
        if recording is None:
            return found
        for number, piece in enumerate(self.pieces):
            for value in {value for step in piece for value in recording.steps[step].takes}:
                found.setdefault(value, []).append(number)
        for value in values_in(recording.output):
            found.setdefault(value, []).append(len(self.pieces))
        return found

    def first_of(self, step: int) -> int:
        """The first part that begins at a step or after it."""
        return sum(start < step for start in self.starts[:-1])

    def run(self, number: int, values: dict[Value, Tensor], recording: Recording | None) -> Any:
        """Run a part: what it gives is added to `values`.

        Args:
            recording: for as many samples as there are; None where the network is run as it is.

        Returns:
            What the network returns, after the last part.
        """
        if self._stage is None or recording is None:
            result = whole_outputs(self._model(values.pop(IMAGE)))
            tensors = (one for one in tree_leaves(result) if isinstance(one, Tensor))
            values.update((Value(0, part), one) for part, one in enumerate(tensors))
            return result
        self._stage.run_part(self.pieces[number], recording, values, _META)
        if number == self.span[-1]:
            values.update({value: whole_of(one) for value, one in values.items()})
        return output_of(recording, values) if number == len(self.pieces) - 1 else None

    @torch.no_grad()
    def passed(
        self, number: int, values: Mapping[Value, Tensor], recording: Recording
    ) -> dict[Value, Tensor]:
        """What there is after a part, of what there was before it."""
        found = dict(values)
        with _META, keyed(0, 0, 0):
            self.run(number, found, recording)
        return found

    def divided(
        self, which: DividedStage, recording: Recording | None, entering: Mapping[Value, Tensor]
    ) -> NetworkParts:
        """A copy of which the last rank of the tensor axis, which has most, has its channels.

        Args:
            recording: in evaluation.
            entering: what its first part may take.

        Raises:
            UnsupportedSpatialOp: if how weights are used cannot be found out.
        """
        computed = computed_attributes(self._model)  # which deepcopy refuses
        copied = copy.deepcopy(self, {id(one): torch.empty_like(one) for one in computed})
        copied.span = range(which.first, which.after)
        network = copied._model if copied._stage is None else copied._stage
        comm = Dry(which.ranks - 1, which.ranks, "tensor")

        def run(shadow: nn.Module) -> None:
            values = dict(entering)
            if not isinstance(shadow, Stage) or recording is None:
                shadow(values[IMAGE])
                return
            for number in copied.span:
                shadow.run_part(copied.pieces[number], recording, values, _META)

        divide(network, uses_of(network, comm, run, dict(which.plan)), comm)
        return copied

    def given(self, number: int, values: dict[Value, Tensor]) -> dict[Value, Tensor]:
        """What a part has given that is still needed."""
        steps = range(1) if self._stage is None else self.pieces[number]
        return {value: one for value, one in values.items() if value.step in steps}
