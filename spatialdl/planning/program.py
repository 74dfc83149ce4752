"""The steps of a network, which the planner cuts into stages and runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.comm.dry import Dry
from spatialdl.comm.mesh import Mesh, dry_mesh
from spatialdl.layout.layout import Layout, finer_grid, finer_parts
from spatialdl.pipeline.partition import (
    StepCosts,
    cannot_cut,
    cut_bounds,
    estimated,
    leftovers,
    state_of,
)
from spatialdl.pipeline.recorder import CannotRecord
from spatialdl.pipeline.recording import Forward
from spatialdl.pipeline.shapes import Border, border_values
from spatialdl.pipeline.stage import SAMPLES, Stage, crossing, is_chain, values_in
from spatialdl.pipeline.steps import IMAGE, Recording, Value, output_of
from spatialdl.spatial.channels.tensor import ChannelTensor, all_channels
from spatialdl.spatial.channels.weights import divide, full_outputs, uses_of
from spatialdl.spatial.meta import computed_attributes, dtype_of, meta_copy, on_meta
from spatialdl.spatial.random import keyed
from spatialdl.spatial.recompute import recompute_blocks
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.torch_internals import tree_leaves

_META = torch.device("meta")


class DividedStage(NamedTuple):
    """A stage whose channels are divided over the ranks of the tensor axis.

    Attributes:
        ranks: number of ranks that divide them.
        first, after: its first part, and the one after its last.
        plan: by module name, how weights are divided where it cannot be inferred, see
            `channels.weights.Plan`.
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
        return dtype_of(self._model)

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
            result = full_outputs(self._model(values.pop(IMAGE)))
            tensors = (tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor))
            values.update((Value(0, part), tensor) for part, tensor in enumerate(tensors))
            return result
        self._stage.run_part(self.pieces[number], recording, values, _META)
        if number == self.span[-1]:
            values.update({value: all_channels(tensor) for value, tensor in values.items()})
        return output_of(recording, values) if number == len(self.pieces) - 1 else None

    def entering(
        self, which: DividedStage, recording: Recording | None, images: Mapping[Value, Tensor]
    ) -> dict[Value, Tensor]:
        """Inputs of a stage with whole channels, from the images of a rank."""
        values = dict(images)
        if recording is None:
            return values
        with torch.no_grad(), on_meta(), keyed(0, 0, 0):
            for number in range(which.first):
                self.run(number, values, recording)
        last = len(self.pieces)
        after = which.after + (which.after == last)  # the output is used after all parts
        own, uses = {*range(which.first, after)}, self.uses(recording)
        return {value: tensor for value, tensor in values.items() if own & {*uses.get(value, ())}}

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


def largest_part(layout: Layout, among: Iterable[int] | None = None) -> int:
    """The part with the most pixels, and among those with the most neighbours.

    Args:
        among: candidate parts; None for all.
    """

    def size(part: int) -> tuple[int, int]:
        places = zip(layout.part_at(part), layout.grid, strict=True)
        neighbours = sum((place > 0) + (place < parts - 1) for place, parts in places)
        return math.prod(layout.boxes[part].shape[1:]), neighbours

    return max(range(len(layout.boxes)) if among is None else among, key=size)


class LargestTile:
    """The rank with the largest part of images of a shape (N, C, *spatial).

    Args:
        grid: of ranks.
        stream: virtual tiles of a rank along each spatial dim; () for none.

    Attributes:
        mesh: of all tiles, including virtual ones.
        rank: the rank with the largest part.
        tiles: number of virtual tiles of this rank.
    """

    def __init__(
        self, shape: tuple[int, ...], grid: tuple[int, ...], stream: tuple[int, ...] = ()
    ) -> None:
        self._shape, self._stream = shape, stream
        self.rank = largest_part(Layout.of_ranks(shape[0], shape[2:], grid, stream))
        self.tiles = math.prod(stream)
        if not stream:
            self.mesh: Mesh = dry_mesh(grid, self.rank)
            return
        processes = [finer_parts(grid, stream, part) for part in range(math.prod(grid))]
        fine = finer_grid(grid, stream)
        layout = Layout.even(shape[0], shape[2:], fine)
        self.mesh = dry_mesh(fine, largest_part(layout, processes[self.rank]), processes)

    def image(self, dtype: torch.dtype) -> Tensor:
        """The tile of the images, without data."""
        if self.mesh.parts == 1:
            return torch.empty(self._shape, dtype=dtype, device="meta")
        layout = self.mesh.layout(self._shape[0], self._shape[2:])
        shape = (*self._shape[:2], *self.mesh.own_box(layout).shape[1:])
        return SpatialTensor(torch.empty(shape, dtype=dtype, device="meta"), layout, self.mesh)

    def bytes(self, tensor: Tensor) -> int:
        """Bytes of a tensor on all virtual tiles of the rank; counted once if it is not split."""
        size = local(tensor).nbytes
        if not self._stream or not isinstance(tensor, SpatialTensor):
            return size
        layout = tensor.spatial_layout
        own = math.prod(self.mesh.own_box(layout).shape[1:])
        rank = math.prod(layout.coarser(self._stream).boxes[self.rank].shape[1:])
        return size * rank // own if own else size * self.tiles


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    part = tensor.part if isinstance(tensor, ChannelTensor) else tensor
    return part._tile if isinstance(part, SpatialTensor) else part


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
