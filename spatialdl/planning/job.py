"""A job to plan: network, images and optimizer, with the costs of the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spatialdl.pipeline.recorder import CannotRecord
from spatialdl.pipeline.shapes import Border
from spatialdl.pipeline.steps import Value
from spatialdl.planning.costs import NetworkCosts, between, count, with_stage
from spatialdl.planning.program import DividedStage, Program
from spatialdl.spatial.meta import dtype_of
from spatialdl.spatial.streaming.ledger import Ledger, RankOperation
from spatialdl.spatial.streaming.sizes import ImageSizes, sizes_of
from spatialdl.training.optimization.optimizers import state_ratio, stepped

Recompute = Literal["none", "block", "stage"]

COUNTED = (2, 4)
"""Numbers of samples that are counted; costs of larger ones are extrapolated linearly."""


class CannotWork(ValueError):
    """The network does not support a layout."""


@dataclass
class PlannedJob:
    """A network, its images and its optimizer.

    Attributes:
        model: on any device; it is not run.
        image: (channels, H, W).
        batch: images of a global batch.
        optimizer: makes one for parameters.
        segments: whether the network predicts a class for every pixel.
        names: modules at which stages begin, see `pipeline.partition.cut`.
        read_bytes: memory that reading takes for each pixel of an image.
        tensor_plan: how modules with divided channels are divided, see `DividedStage`.
        limit: bytes of virtual tiles in memory; None for no limit.
        store: destination of the rest: a disk, or pinned host memory.
    """

    model: nn.Module
    image: tuple[int, ...]
    batch: int
    optimizer: Any
    segments: bool = False
    names: Sequence[str] | None = None
    read_bytes: float = 0.0
    on_cpu: bool = True
    tensor_plan: tuple[tuple[str, str], ...] = ()
    limit: int | None = None
    store: Literal["disk", "host"] = "disk"
    _programs: dict[bool, Program] = field(default_factory=dict, init=False)
    _bounds: dict[tuple[Any, ...], list[int]] = field(default_factory=dict, init=False)
    _counted: dict[tuple[Any, ...], NetworkCosts] = field(default_factory=dict, init=False)
    _sizes: dict[int, ImageSizes | None] = field(default_factory=dict, init=False)
    _updates: dict[bool, list[list[RankOperation]]] = field(default_factory=dict, init=False)

    def program(self, again: bool = False) -> Program:
        """Return the steps of the network; with `again`, blocks are recomputed in backward."""
        if again not in self._programs:
            self._programs[again] = Program(self.model, self.image, again)
        return self._programs[again]

    def sizes(self, samples: int) -> ImageSizes | None:
        """Sizes of the network for `samples` whole images, see `streaming.sizes`."""
        if samples not in self._sizes:
            shape = (samples, *self.image)
            self._sizes[samples] = sizes_of(self.model, shape, dtype_of(self.model))
        return self._sizes[samples]

    @cached_property
    def weights(self) -> int:
        return sum(p.nbytes for p in self.model.parameters())

    def can_recompute(self, stages: int) -> bool:
        """Whether there are blocks or layers for ``recompute=block``."""
        program = self.program(again=True)
        return stages > 1 or program.has_blocks or (program.is_chain and len(program.names) > 1)

    def bounds(self, widths: tuple[int, ...], again: bool = False) -> list[int]:
        """Step numbers at which stages begin, and the end, as in `pipeline.partition.cut`.

        Raises:
            CannotWork: if the network cannot be cut this way.
        """
        if (widths, again) not in self._bounds:
            try:
                self._bounds[widths, again] = self.program(again).bounds(widths, self.names)
            except ValueError as error:
                raise CannotWork(str(error)) from error
        return self._bounds[widths, again]

    @cached_property
    def uncut(self) -> str:
        """Why the network cannot be cut into stages; empty if it can."""
        try:
            self.program().bounds((1, 1), None)
        except ValueError as error:
            return str(error)
        return ""

    def costs(
        self,
        samples: int,
        grid: tuple[int, ...],
        again: bool,
        uncut: bool = False,
        divided: DividedStage | None = None,
        stream: tuple[int, ...] = (),
    ) -> NetworkCosts:
        """Costs of all parts on one rank, or on one of its virtual tiles; see `count`.

        Args:
            samples: of a micro-batch of a replica.
            again: whether blocks are recomputed in backward. There may be fewer parts than steps
                then; `parts` returns those of the stages.
            uncut: whether the network is run as a whole.
            divided: a stage with divided channels.
            stream: virtual tiles of a rank along each spatial dim; () for none.

        Raises:
            CannotWork: if the network's steps depend on the number of samples, or its channels
                cannot be divided.
        """
        uncut = uncut and not self.program(again).is_chain
        key = (samples, grid, again, uncut, divided, stream)
        if key not in self._counted:
            low, high = COUNTED
            costs = None
            if samples > high and not self.on_cpu:  # on CPUs costs are not linear in memory sizes
                share = (samples - low) / (high - low)
                two, four = (self.costs(count, *key[1:]) for count in COUNTED)
                costs = between(two, four, share)
            self._counted[key] = costs or self._count(*key)
        return self._counted[key]

    def _count(
        self,
        samples: int,
        grid: tuple[int, ...],
        again: bool,
        uncut: bool,
        divided: DividedStage | None,
        stream: tuple[int, ...],
    ) -> NetworkCosts:
        program, shape = self.program(again), (samples, *self.image)
        keys = {"uncut": uncut, "segments": self.segments, "on_cpu": self.on_cpu}
        whole = None
        if divided is not None and divided.after - divided.first < len(program.parts(uncut).pieces):
            whole = self.costs(samples, grid, again, uncut)
            if len(whole.layers) < divided.first:
                return whole  # refused
        try:
            own = count(program, shape, grid, **keys, divided=divided, stream=stream)
        except CannotRecord as error:
            raise CannotWork(str(error)) from error
        except (RuntimeError, TypeError, ValueError) as error:  # UnsupportedSpatialOp is the first
            if divided is None:
                raise
            reason = f"its channels cannot be divided over {divided.ranks} ranks: {error}"
            raise CannotWork(reason) from error
        return own if whole is None or divided is None else with_stage(whole, own, divided)

    def parts(self, bounds: Sequence[int], again: bool) -> list[tuple[int, int]]:
        """First part of each stage, and the one after its last, as indices into `costs`.

        A recomputed piece belongs to the stage in which it begins.
        """
        program = self.program(again)
        parts = program.parts(uncut=len(bounds) == 2 and not program.is_chain)
        return list(pairwise(map(parts.first_of, bounds)))

    def borders(self, bounds: Sequence[int], again: bool) -> dict[Border, tuple[Value, ...]]:
        """Borders between the stages of `parts` that values pass, and the values."""
        program = self.program(again)
        parts = program.parts(uncut=len(bounds) == 2 and not program.is_chain)
        return program.borders([parts.starts[parts.first_of(bound)] for bound in bounds])

    @cached_property
    def state_ratio(self) -> float:
        """Bytes of optimizer state per byte of weights."""
        return state_ratio(self.optimizer)

    def weights_of(self, steps: Iterable[int], again: bool) -> int:
        """Bytes of the whole parameters of steps."""
        state = (tensor for step in steps for tensor in self.program(again).state[step])
        return sum(tensor.nbytes for tensor in state if isinstance(tensor, nn.Parameter))

    def updates(self, again: bool) -> list[list[RankOperation]]:
        """The optimizer's operations for each step of the network, with existing state."""
        if again not in self._updates:
            self._updates[again] = [self._update(state) for state in self.program(again).state]
        return self._updates[again]

    def _update(self, state: Sequence[Tensor]) -> list[RankOperation]:
        ledger = Ledger()
        for p in state:
            if isinstance(p, nn.Parameter):
                parameter, optimizer = stepped(self.optimizer, nn.Parameter(torch.empty_like(p)))
                parameter.grad = torch.empty_like(parameter)
                with ledger.watch():
                    optimizer.step()
        return [work for works in ledger.work.values() for work in works]
