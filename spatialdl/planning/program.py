"""The steps of a network, as the planner cuts them into stages and runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from torch import Tensor, nn

from spatialdl.pipeline.balance import StepCosts, Weigh
from spatialdl.pipeline.partition import cannot_cut, cut_bounds, leftovers, state_of
from spatialdl.pipeline.recording import CannotRecord, Forward
from spatialdl.pipeline.shapes import Border, border_values
from spatialdl.pipeline.stage import SAMPLES, Stage, crossing, is_chain
from spatialdl.pipeline.steps import IMAGE, Recording, Value
from spatialdl.planning.parts import DividedStage, NetworkParts
from spatialdl.spatial.recompute import recompute_blocks
from spatialdl.spatial.shadow import meta_copy


class Program:
    """The steps of a network, and where it is cut into stages.

    Args:
        model: stays as it is; a copy without memory is run.
        image: (channels, H, W).
        again: whether blocks and loose layers run again in backward.

    Attributes:
        refused: why it cannot be cut into stages; empty if it can.
        has_blocks: whether it has blocks that run again.
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
        """Of the steps; of one if the network cannot be recorded."""
        return [""] if self._recording is None else [one.name for one in self._recording.steps]

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
            owner |= {id(one): (number, one) for _, one in state_of(self._model, step)}
        unused = leftovers(self._model, self._recording, range(len(steps) + 1))
        for number, paths in enumerate(unused):
            for one in map(self._tensor, paths):
                owner.setdefault(id(one), (number, one))
        found: list[list[Tensor]] = [[] for _ in steps]
        for number, one in owner.values():
            found[number].append(one)
        return found

    def _tensor(self, path: str) -> Tensor:
        holder, _, name = path.rpartition(".")
        found: Tensor = getattr(self._model.get_submodule(holder), name)
        return found

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
        """What runs: the steps, or the network as it is where it is neither cut nor a chain."""
        return self._whole if self._recording is None or uncut else self._stage

    def recording(self, samples: int) -> Recording | None:
        """In training, with so many samples; None if the network cannot be recorded.

        Raises:
            CannotRecord: if it does something else with so many samples.
        """
        return None if self._recording is None else self._forward.of(samples, training=True)

    def entering(
        self,
        stage: DividedStage,
        uncut: bool,
        grid: tuple[int, ...],
        images: Mapping[Value, Tensor],
    ) -> Mapping[Value, Tensor]:
        """What a stage takes on a rank of a grid, whole, in training.

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
        after = stage.after + (stage.after == last)  # what the network returns is taken after all
        own, uses = {*range(stage.first, after)}, parts.uses(recording)
        found = before[stage.first]
        return {value: one for value, one in found.items() if own & {*uses.get(value, ())}}

    def divided(
        self, which: DividedStage, uncut: bool, samples: int, entering: Mapping[Value, Tensor]
    ) -> NetworkParts:
        """The parts, one of them a stage with divided channels; like `NetworkParts.divided`."""
        if (uncut, which) not in self._divided:
            parts = self.parts(uncut)
            recording = self._forward.of(samples, training=False) if parts.is_recorded else None
            self._divided[uncut, which] = parts.divided(which, recording, entering)
        return self._divided[uncut, which]

    def costs(self, weigh: Weigh) -> StepCosts:
        """What is balanced."""
        return weigh(self._model, self._evaluated, (SAMPLES, *self._image))

    def bounds(
        self, widths: Sequence[int], names: Sequence[str] | None, costs: Callable[[], StepCosts]
    ) -> list[int]:
        """The steps with which stages begin, and the end, as `pipeline.partition.cut` finds them.

        Raises:
            ValueError: if the network cannot be cut so.
        """
        if len(widths) == 1:
            return [0, len(self.names)]
        if self._recording is None:
            raise cannot_cut(self._model, len(widths), self.refused)
        return cut_bounds(self._model, self._recording, widths, names, costs)

    def borders(self, bounds: Sequence[int]) -> dict[Border, tuple[Value, ...]]:
        """All borders between stages over which something passes, and what."""
        if self._recording is None:
            return {}
        both = [crossing(self._recording, start, stop) for start, stop in pairwise(bounds)]
        return border_values([takes for takes, _ in both], [gives for _, gives in both])
