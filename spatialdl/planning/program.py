"""The steps of a network, which the planner cuts into stages and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from torch import Tensor, nn

from spatialdl.pipeline.balance import StepCosts, estimated
from spatialdl.pipeline.partition import cannot_cut, cut_bounds, leftovers, state_of
from spatialdl.pipeline.recorder import CannotRecord
from spatialdl.pipeline.recording import Forward
from spatialdl.pipeline.shapes import Border, border_values
from spatialdl.pipeline.stage import SAMPLES, Stage, crossing, is_chain
from spatialdl.pipeline.steps import IMAGE, Recording, Value
from spatialdl.planning.parts import DividedStage, NetworkParts
from spatialdl.spatial.meta import meta_copy
from spatialdl.spatial.recompute import recompute_blocks


class Program:
    """The steps of a network, and its cuts into stages.

    Args:
        model: not modified; a copy without memory is run.
        image: (channels, H, W).
        again: whether blocks and loose layers are recomputed in backward.

    Attributes:
        refused: why it cannot be cut into stages; empty if it can.
        has_blocks: whether it has blocks to recompute.
    """

    def __init__(self, model: nn.Module, image: tuple[int, ...], again: bool = False) -> None:
        self._model, self._image, self._again = meta_copy(model), image, again
        self.has_blocks = again and bool(recompute_blocks(self._model))
        self._forward = Forward(self._model, image)
        self._model.train()
        self.refused = ""
        self._before: dict[tuple[object, ...], list[dict[Value, Tensor]]] = {}
        self._divided: dict[tuple[bool, DividedStage], NetworkParts] = {}
        self._recording: Recording | None = None
        try:
            self._recording = self._forward.of(SAMPLES, training=True)
            self._evaluated = self._forward.of(SAMPLES, training=False)
        except CannotRecord as reason:
            self._recording, self.refused = None, str(reason)

    @cached_property
    def names(self) -> list[str]:
        """Names of the steps; a single empty one if the network cannot be recorded."""
        return [""] if self._recording is None else [step.name for step in self._recording.steps]

    @cached_property
    def is_chain(self) -> bool:
        """Whether its stages are chains of modules."""
        return self._recording is not None and is_chain(self._recording)

    @cached_property
    def state(self) -> list[list[Tensor]]:
        """Parameters and buffers of each step, each once; unused ones as `cut` assigns them."""
        if self._recording is None:
            return [[*self._model.parameters(), *self._model.buffers()]]
        steps = self._recording.steps
        owner: dict[int, tuple[int, Tensor]] = {}
        for number, step in enumerate(steps):
            owner |= {id(tensor): (number, tensor) for _, tensor in state_of(self._model, step)}
        unused = leftovers(self._model, self._recording, range(len(steps) + 1))
        for number, paths in enumerate(unused):
            for tensor in map(self._tensor, paths):
                owner.setdefault(id(tensor), (number, tensor))
        state: list[list[Tensor]] = [[] for _ in steps]
        for number, tensor in owner.values():
            state[number].append(tensor)
        return state

    def _tensor(self, path: str) -> Tensor:
        holder, _, name = path.rpartition(".")
        tensor: Tensor = getattr(self._model.get_submodule(holder), name)
        return tensor

    @cached_property
    def _stage(self) -> NetworkParts:
        assert self._recording is not None
        steps = len(self._recording.steps)
        stage = Stage(self._model, self._forward, 0, steps, (), self._again)
        return NetworkParts(self._model, stage, self.names, self.state)

    @cached_property
    def _whole(self) -> NetworkParts:
        return NetworkParts(self._model, None, self.names, self.state)

    def parts(self, uncut: bool) -> NetworkParts:
        """The parts to run: the steps, or the network as one part if `uncut` or not recorded."""
        return self._whole if self._recording is None or uncut else self._stage

    def recording(self, samples: int) -> Recording | None:
        """Recording in training for `samples` samples; None if the network cannot be recorded.

        Raises:
            CannotRecord: if its steps depend on the number of samples.
        """
        return None if self._recording is None else self._forward.of(samples, training=True)

    def entering(
        self,
        stage: DividedStage,
        uncut: bool,
        grid: tuple[int, ...],
        images: Mapping[Value, Tensor],
    ) -> Mapping[Value, Tensor]:
        """Inputs of a stage on a rank of a grid, with whole channels, in training.

        Args:
            images: of that rank.
        """
        parts = self.parts(uncut)
        if not parts.is_recorded or self._recording is None:
            return images
        recording = self._forward.of(len(images[IMAGE]), training=True)
        before = self._before.setdefault((uncut, grid, images[IMAGE].shape), [dict(images)])
        while len(before) <= stage.first:
            before.append(parts.passed(len(before) - 1, before[-1], recording))
        last = len(parts.pieces)
        after = stage.after + (stage.after == last)  # the output is used after all parts
        own, uses = {*range(stage.first, after)}, parts.uses(recording)
        values = before[stage.first]
        return {value: tensor for value, tensor in values.items() if own & {*uses.get(value, ())}}

    def divided(
        self, which: DividedStage, uncut: bool, samples: int, entering: Mapping[Value, Tensor]
    ) -> NetworkParts:
        """The parts, with divided channels in one stage; see `NetworkParts.divided`."""
        if (uncut, which) not in self._divided:
            parts = self.parts(uncut)
            recording = self._forward.of(samples, training=False) if parts.is_recorded else None
            self._divided[uncut, which] = parts.divided(which, recording, entering)
        return self._divided[uncut, which]

    @cached_property
    def _costs(self) -> StepCosts:
        return estimated(self._model, self._evaluated, (SAMPLES, *self._image))

    def bounds(self, widths: Sequence[int], names: Sequence[str] | None) -> list[int]:
        """Step numbers at which stages begin, and the end, as in `pipeline.partition.cut`.

        Raises:
            ValueError: if the network cannot be cut this way.
        """
        if len(widths) == 1:
            return [0, len(self.names)]
        if self._recording is None:
            raise cannot_cut(self._model, len(widths), self.refused)
        return cut_bounds(self._model, self._recording, widths, names, lambda: self._costs)

    def borders(self, bounds: Sequence[int]) -> dict[Border, tuple[Value, ...]]:
        """All borders between stages that values pass, and the values."""
        if self._recording is None:
            return {}
        both = [crossing(self._recording, start, stop) for start, stop in pairwise(bounds)]
        return border_values([takes for takes, _ in both], [gives for _, gives in both])
