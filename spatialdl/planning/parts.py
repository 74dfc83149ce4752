"""Splits a network into the parts that the planner runs without data."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.channels.tensor import whole_of
from spatialdl.channels.weights import divide, uses_of, whole_outputs
from spatialdl.comm.dry import Dry
from spatialdl.pipeline.stage import Stage, values_in
from spatialdl.pipeline.steps import IMAGE, Recording, Value, output_of
from spatialdl.random import keyed
from spatialdl.spatial.meta import computed_attributes
from spatialdl.torch_internals import tree_leaves

_META = torch.device("meta")


class DividedStage(NamedTuple):
    """A stage whose channels are divided over the ranks of the tensor axis.

    Attributes:
        ranks: number of ranks that divide them.
        first, after: its first part, and the one after its last.
        plan: by module name, how weights are divided where it cannot be inferred, see
            `channels.uses.Plan`.
    """

    ranks: int
    first: int
    after: int
    plan: tuple[tuple[str, str], ...] = ()


class NetworkParts:
    """The parts of a network in running order: pieces of a stage, or the whole network.

    Args:
        model: on the ``meta`` device.
        stage: all of its steps; None to run the network as one part.
        state: parameters and buffers, step by step.

    Attributes:
        names: of the parts.
        starts: the first step of each part, and the number of steps.
        state: parameters and buffers of each part.
        span: the parts to run: all, or those of a divided stage.
    """

    def __init__(
        self, model: nn.Module, stage: Stage | None, names: list[str], state: list[list[Tensor]]
    ) -> None:
        self._model, self._stage = model, stage
        self.pieces = [list(range(len(state)))] if stage is None else stage.parts
        self.names = ["" if stage is None else names[piece[0]] for piece in self.pieces]
        self.starts = [piece[0] for piece in self.pieces] + [len(state)]
        self.state = [[tensor for step in piece for tensor in state[step]] for piece in self.pieces]
        self.span = range(len(self.pieces))

    @property
    def is_recorded(self) -> bool:
        return self._stage is not None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the images."""
        return next((p.dtype for p in self._model.parameters()), torch.get_default_dtype())

    def uses(self, recording: Recording | None) -> dict[Value, list[int]]:
        """The parts that take a value, in order; the output is taken after all parts."""
        uses: dict[Value, list[int]] = {}
        if recording is None:
            return uses
        for number, piece in enumerate(self.pieces):
            for value in {value for step in piece for value in recording.steps[step].takes}:
                uses.setdefault(value, []).append(number)
        for value in values_in(recording.output):
            uses.setdefault(value, []).append(len(self.pieces))
        return uses

    def first_of(self, step: int) -> int:
        """The first part that begins at or after a step."""
        return sum(start < step for start in self.starts[:-1])

    def run(self, number: int, values: dict[Value, Tensor], recording: Recording | None) -> Any:
        """Run a part and add its outputs to `values`.

        Args:
            recording: for the number of samples; None where the network is run as one part.

        Returns:
            The output of the network, after the last part.
        """
        if self._stage is None or recording is None:
            result = whole_outputs(self._model(values.pop(IMAGE)))
            tensors = (tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor))
            values.update((Value(0, part), tensor) for part, tensor in enumerate(tensors))
            return result
        self._stage.run_part(self.pieces[number], recording, values, _META)
        if number == self.span[-1]:
            values.update({value: whole_of(tensor) for value, tensor in values.items()})
        return output_of(recording, values) if number == len(self.pieces) - 1 else None

    @torch.no_grad()
    def passed(
        self, number: int, values: Mapping[Value, Tensor], recording: Recording
    ) -> dict[Value, Tensor]:
        """Values after a part, from those before it."""
        values_after = dict(values)
        with _META, keyed(0, 0, 0):
            self.run(number, values_after, recording)
        return values_after

    def divided(
        self, which: DividedStage, recording: Recording | None, entering: Mapping[Value, Tensor]
    ) -> NetworkParts:
        """A copy with the channels of the last rank of the tensor axis, whose part is largest.

        Args:
            recording: in evaluation.
            entering: inputs of its first part.

        Raises:
            UnsupportedSpatialOp: if the use of a weight cannot be inferred.
        """
        computed = computed_attributes(self._model)  # not supported by deepcopy
        copied = copy.deepcopy(self, {id(tensor): torch.empty_like(tensor) for tensor in computed})
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
        """Outputs of a part that are still needed."""
        steps = range(1) if self._stage is None else self.pieces[number]
        return {value: tensor for value, tensor in values.items() if value.step in steps}
