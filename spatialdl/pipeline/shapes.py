"""What passes between stages, found out without data and without talking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh, dry_mesh
from spatialdl.comm.repartition import shape_of
from spatialdl.parallel.layout import Layout, by, even_bounds
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.autocast import value_types
from spatialdl.pipeline.recording import meta_copy
from spatialdl.pipeline.stage import Stage, run_stage, takes_of
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.spatial.constants import on
from spatialdl.spatial.dims import SpatialDims
from spatialdl.spatial.span import positions_in
from spatialdl.spatial.tensor import SpatialTensor, from_tile


class Border(NamedTuple):
    """Two stages of which the first gives something to the second, which need not be the next."""

    giver: int
    taker: int


@dataclass(frozen=True)
class SplitShape(HandoverShape):
    """Of a split tensor whose spatial dims are not the last ones: tokens, channels-last maps.

    Each tile is one interval of a flat sample, part after part. A stage that is not split puts the
    parts in their places.

    Attributes:
        pixels: the layout of the spatial dims, on all stages that are split.
        dims: where they are in `shape`.
    """

    pixels: Layout
    dims: SpatialDims

    @classmethod
    def of(cls, output: SpatialTensor, parts: int, is_split: bool) -> SplitShape:
        """What a stage gives.

        Args:
            parts: between which the next stage divides samples.
            is_split: whether it is split as this stage is.
        """
        shape, dims, pixels = tuple(output.shape), output.spatial_dims, output.spatial_layout
        tiles = (_tile_shape(shape, dims, pixels, part) for part in range(len(pixels.boxes)))
        edges = tuple(accumulate(map(prod, tiles), initial=0))
        sender = Layout((0, shape[0]), (edges,))
        receiver = sender if is_split else Layout.by_sample(shape[0], sender.size, parts)
        return cls(shape, output.dtype, sender, receiver, pixels, dims)

    def local_shape(self, layout: Layout, part: int) -> tuple[int, ...]:
        if layout.grid != (1,):
            return (layout.samples, *_tile_shape(self.shape, self.dims, self.pixels, part))
        samples, elements = layout.boxes[part if len(layout.boxes) > 1 else 0].shape
        return samples, elements

    def boxed(self, local: Tensor) -> Tensor:
        return local.contiguous().view(len(local), -1)

    def given_to(self, mesh: Mesh, received: Tensor) -> Tensor:
        """What a stage gets: a split tensor, or the whole one."""
        if self.receiver.grid != (1,):
            return from_tile(received, self.pixels, mesh, self.dims)
        order, block = _order(self.shape[1:], self.dims, self.pixels)
        flat = received.view(len(received), -1, block)
        return flat.index_select(1, on(order, flat.device)).view(len(received), *self.shape[1:])


def _tile_shape(
    shape: tuple[int, ...], dims: SpatialDims, pixels: Layout, part: int
) -> tuple[int, ...]:
    return dims.of_part(part).sizes(shape, pixels.boxes[part].shape[1:])[1:]


@lru_cache(maxsize=256)
def _order(sample: tuple[int, ...], dims: SpatialDims, pixels: Layout) -> tuple[Tensor, int]:
    """Where in the tiles, one after the other, each block of a sample is; and the size of a block.

    A block is what follows on a place in the last dim that is split.
    """
    last = max(dims.at)
    block = prod(sample[len(sample) + last + 1 :]) if last < -1 else 1
    places = []
    for part in range(len(pixels.boxes)):
        place = torch.zeros((), dtype=torch.int64)
        for dim in range(-len(sample), last + 1):
            own = positions_in(pixels, dims, sample[dim], dim, part)
            place = place[..., None] * sample[dim] + own
        places.append(place.flatten())
    return torch.cat(places).argsort(), block


Passing = dict[Border, dict[Value, HandoverShape]]
"""What passes each border for a micro-batch, in order."""


def borders(stages: Sequence[nn.Module]) -> dict[Border, tuple[Value, ...]]:
    """All borders over which something passes, and what."""
    return border_values(
        [takes_of(stage) for stage in stages],
        [stage.gives if isinstance(stage, Stage) else () for stage in stages],
    )


def border_values(
    takes: Sequence[Sequence[Value]], gives: Sequence[Sequence[Value]]
) -> dict[Border, tuple[Value, ...]]:
    """The same from what stages take and give; the first one gives the image, too."""
    found: dict[Border, tuple[Value, ...]] = {}
    for taker, taken in enumerate(takes):
        for giver in range(taker):
            given = (*gives[giver], IMAGE) if giver == 0 else gives[giver]
            both = tuple(value for value in taken if value in given)
            if both:
                found[Border(giver, taker)] = both
    return found


class HandoverShapes:
    """What passes each border of a network that is cut into stages.

    Every rank runs copies of the stages without memory, so that both sides of a border know.

    Args:
        stages: all of them.
        image_size: global (channels, *spatial).
        dtype: of the images.
        mixed: the device of the stages and the type to which autocast casts there, if it does.

    Attributes:
        borders: all over which something passes, and what.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        placement: Placement,
        image_size: tuple[int, ...],
        dtype: torch.dtype,
        mixed: tuple[torch.device, torch.dtype] | None = None,
    ) -> None:
        self._stages = [meta_copy(stage) for stage in stages[:-1]]  # nothing follows the last
        self._first, self.borders = stages[0], borders(stages)
        self._placement, self._image_size, self._dtype = placement, image_size, dtype
        self._found: dict[int, Passing] = {}
        self._mixed = mixed
        self._types: dict[Value, torch.dtype] = {}

    def of(self, samples: int) -> Passing:
        """What passes for a micro-batch of `samples`."""
        if samples not in self._found:
            if isinstance(self._first, Stage):
                for own in {samples, *own_counts(self._placement, samples)}:
                    self._first.prepare(own)
            self._found[samples] = self._typed(self._dry_run(samples), samples)
        return self._found[samples]

    def _typed(self, passing: Passing, samples: int) -> Passing:
        if self._mixed is None or not self.borders:
            return passing
        if not self._types:
            image = torch.empty((samples, *self._image_size), dtype=self._dtype, device="meta")
            self._types = value_types(self._stages, image, *self._mixed)
        return {
            border: {value: replace(part, dtype=self._types[value]) for value, part in one.items()}
            for border, one in passing.items()
        }

    @torch.no_grad()
    def _dry_run(self, samples: int) -> Passing:
        found: Passing = {}
        arrived = self.entering(samples)
        for number, dry in enumerate(self._stages):
            with torch.device("meta"):  # where layers make tensors of their own, too
                given = arrived[number] | run_stage(dry, arrived[number], samples)
            found |= self.pass_on(number, given, arrived, samples)
        return found

    def entering(self, samples: int) -> list[dict[Value, Tensor]]:
        """What arrives at each stage before any of them has run: the images at the first."""
        image = torch.empty(samples, *self._image_size, dtype=self._dtype, device="meta")
        layout = Layout.even(samples, self._image_size[1:], self._placement.grids[0])
        arrived: list[dict[Value, Tensor]] = [{} for _ in self._placement.grids]
        arrived[0][IMAGE] = _meta_input(image, layout, self._placement.grids[0])
        return arrived

    def pass_on(
        self,
        giver: int,
        given: Mapping[Value, Tensor],
        arrived: Sequence[dict[Value, Tensor]],
        samples: int,
    ) -> Passing:
        """Add what a stage has given to what arrives at later ones.

        Raises:
            ValueError: if it cannot pass a border.
        """
        found: Passing = {}
        for border, values in self.borders.items():
            if border.giver == giver:
                found[border] = {
                    value: _handover_shape(given[value], border, self._placement, samples)
                    for value in values
                }
                grid = self._placement.grids[border.taker]
                for value, shape in found[border].items():
                    arrived[border.taker][value] = _arrived(shape, grid)
        return found


def own_samples(placement: Placement, stage: int, part: int, samples: int) -> range:
    """The samples of a micro-batch that a rank of a stage works on."""
    parts = placement.batch_parts(stage)
    if parts == 1:
        return range(samples)
    bounds = even_bounds(samples, parts)
    return range(bounds[part], bounds[part + 1])


def own_counts(placement: Placement, samples: int) -> set[int]:
    """How many samples ranks may have, beside none."""
    found = {
        len(own_samples(placement, stage, part, samples))
        for stage in range(placement.stages)
        for part in range(placement.batch_parts(stage))
    }
    return found - {0}


def _arrived(part: HandoverShape, grid: tuple[int, ...]) -> Tensor:
    if isinstance(part, SplitShape) and prod(grid) > 1:
        tile = part.local_shape(part.receiver, 0)
        made = torch.empty(tile, dtype=part.dtype, device="meta")
        return SpatialTensor(made, part.pixels, dry_mesh(grid), part.dims)
    whole = torch.empty(part.shape, dtype=part.dtype, device="meta")
    return _meta_input(whole, part.receiver, grid)


def _meta_input(x: Tensor, layout: Layout, grid: tuple[int, ...]) -> Tensor:
    if len(layout.boxes) == 1 or prod(grid) == 1:
        return x
    tile = x.new_empty(shape_of(x, layout.boxes[0]))
    return SpatialTensor(tile, layout, dry_mesh(grid))


def _handover_shape(
    output: Tensor, border: Border, placement: Placement, samples: int
) -> HandoverShape:
    shape = tuple(output.shape)
    parts = placement.batch_parts(border.giver), placement.batch_parts(border.taker)
    if shape[:1] != (samples,):
        if parts[0] > 1:
            raise ValueError(
                f"a tensor of {shape} would pass between stages {border.giver} and "
                f"{border.taker}, of which ranks hold some of {samples} samples each: its first "
                "dim must be the samples; choose another place by parallel.cut"
            )
        parts = 1, 1
    rows = shape[0] if shape else 1
    grids = placement.grids[border.giver], placement.grids[border.taker]
    is_map = len(shape) == placement.dims + 2 and prod(shape[2:]) > 1
    sender = None
    if isinstance(output, SpatialTensor) and not output.spatial_dims.is_image:
        _check_dims(output, border, grids, samples)
        return SplitShape.of(output, parts[1], prod(grids[1]) > 1)
    if isinstance(output, SpatialTensor):
        sender = output.spatial_layout
    elif is_map and prod(grids[0]) == 1 and prod(grids[1]) > 1:
        sender = Layout.by_sample(rows, shape[2:], parts[0])
    if sender is None:
        size = (prod(shape[1:]),)
        sender, receiver = (Layout.by_sample(rows, size, n) for n in parts)
    elif parts[1] > 1:
        receiver = Layout.by_sample(rows, sender.size, parts[1])
    else:
        is_same = grids[0] == grids[1] and parts[0] == 1
        receiver = sender if is_same else Layout.even(rows, sender.size, grids[1])
        _check_size(receiver, grids[1], border)
    return HandoverShape(shape, output.dtype, sender, receiver)


def _check_dims(
    output: SpatialTensor, border: Border, grids: tuple[Sequence[int], ...], samples: int
) -> None:
    what = (
        f"a split tensor of {tuple(output.shape)}{output.spatial_dims.describe()} would pass "
        f"between stages {border.giver} and {border.taker}"
    )
    if output.dim() < 2 or output.shape[0] != samples or -output.dim() in output.spatial_dims.at:
        raise ValueError(
            f"{what}: its first dim must be the {samples} samples; choose another place by "
            "parallel.cut"
        )
    if prod(grids[1]) > 1 and tuple(grids[0]) != tuple(grids[1]):
        raise ValueError(
            f"{what}, which are cut {by(grids[0])} and {by(grids[1])}: only images may change "
            "their grid; choose another place by parallel.cut, or one grid for both stages"
        )


def _check_size(layout: Layout, grid: tuple[int, ...], border: Border) -> None:
    if any(extent < parts for extent, parts in zip(layout.size, grid, strict=True)):
        raise ValueError(
            f"stage {border.taker} would cut images of {by(layout.size)} into {by(grid)} tiles: "
            f"take parallel.spatial_stages={border.taker}, a smaller parallel.grid, or earlier "
            "places by parallel.cut"
        )
