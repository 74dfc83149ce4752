"""Shapes of the tensors that pass between stages, computed without data or communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh, dry_mesh
from spatialdl.comm.repartition import shape_of
from spatialdl.layout.layout import Layout, by, even_bounds, last_slices
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.autocast import value_types
from spatialdl.pipeline.stage import Stage, run_stage, takes_of
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.spatial.channels.weights import Plan, divide, uses_of
from spatialdl.spatial.dims import SpatialDims, from_image, split_tokens, to_image
from spatialdl.spatial.meta import meta_copy, on_meta
from spatialdl.spatial.tensor import SpatialTensor, from_tile


class Border(NamedTuple):
    """Two stages, not necessarily adjacent, of which the first sends tensors to the second."""

    giver: int
    taker: int


@dataclass(frozen=True)
class SplitShape(HandoverShape):
    """Shape of a split tensor whose spatial dims are not last: tokens, channels-last maps.

    It is sent as an image (N, ..., *spatial), to any grid. Tokens that belong to no pixel are in a
    corner before the pixels. The image is larger by the number of tokens along its first spatial
    dim, and by one along the others. The rest of the added area is zero and ignored.

    Attributes:
        seen: the global shape of the tensor; `shape` is that of the image.
        dims: its spatial dims.
        pixels: the layouts of the spatial dims on the two stages.
    """

    seen: tuple[int, ...]
    dims: SpatialDims
    pixels: tuple[Layout, Layout]

    @classmethod
    def of(cls, output: SpatialTensor, receiver: Layout) -> SplitShape:
        """Shape of a stage's output, sent to one with the spatial dims on layout `receiver`."""
        seen, dims, sender = tuple(output.shape), output.spatial_dims, output.spatial_layout
        _, pixels, _ = split_tokens(torch.empty(seen, device="meta"), dims)
        image = to_image(pixels, dims.of_pixels, sender.size)
        before, after = (_with_corner(layout, dims) for layout in (sender, receiver))
        shape = (*image.shape[: -len(sender.size)], *before.size)
        return cls(shape, output.dtype, before, after, seen, dims, (sender, receiver))

    def leaving(self, tile: Tensor, part: int) -> Tensor:
        """The tile of a part of the sender, in the form that is sent."""
        extents = self.pixels[0].boxes[part].shape[1:]
        before, own, after = split_tokens(tile, self.dims.of_part(part))
        image = to_image(own, self.dims.of_pixels, extents)
        if not self.dims.extra_tokens:
            return image.contiguous()
        larger = image.new_zeros(self.local_shape(self.sender, part))
        larger[_behind(larger, extents)] = image
        if part == 0:
            tokens = torch.cat([before, after], self.dims.at[0]).movedim(self.dims.at[0], -1)
            corner = larger[_corner(self.dims)]
            corner.copy_(tokens.reshape(corner.shape))
        return larger

    def tile_of(self, image: Tensor, layout: Layout, part: int) -> Tensor:
        """Invert `leaving`, on either side; differentiable."""
        dims, is_whole = self.dims, prod(layout.grid) == 1
        own = image[_behind(image, layout.boxes[0 if is_whole else part].shape[1:])]
        pixels = from_image(own, dims.of_pixels, (len(image), *self.seen[1:]))
        if not dims.extra_tokens or (part > 0 and not is_whole):
            return pixels
        tokens = image[_corner(dims)].flatten(-len(dims.at)).movedim(-1, dims.at[0])
        before, after = torch.split(tokens, [dims.prefix, dims.suffix], dims.at[0])
        return torch.cat([before, pixels, after], dims.at[0])

    def stage_input(self, mesh: Mesh, received: Tensor) -> Tensor:
        """Make the input of a stage from a received tile: a split tensor, or the whole one."""
        layout = self.pixels[1]
        tile = self.tile_of(received, layout, mesh.part)
        return tile if prod(layout.grid) == 1 else from_tile(tile, layout, mesh, self.dims)


def _with_corner(layout: Layout, dims: SpatialDims) -> Layout:
    """Layout of images with a corner for tokens that belong to no pixel, see `SplitShape`."""
    if not dims.extra_tokens:
        return layout
    sizes = (dims.extra_tokens, *(1,) * (len(layout.cuts) - 1))
    cuts = (
        (0, *(bound + size for bound in bounds[1:]))
        for bounds, size in zip(layout.cuts, sizes, strict=True)
    )
    return Layout(layout.batch, tuple(cuts))


def _corner(dims: SpatialDims) -> tuple[Any, ...]:
    """Slices of an image that select the tokens that belong to no pixel."""
    return last_slices((slice(dims.extra_tokens), *(slice(1),) * (len(dims.at) - 1)))


def _behind(image: Tensor, sizes: Sequence[int]) -> tuple[Any, ...]:
    """Slices of a larger image that select the pixels, `sizes` of them along the last dims."""
    return last_slices(
        slice(larger - size, None)
        for larger, size in zip(image.shape[-len(sizes) :], sizes, strict=True)
    )


@lru_cache(maxsize=4096)
def over_ranks(shape: HandoverShape, stream: tuple[int, ...]) -> HandoverShape:
    """Shape for the hand-over between ranks, whose tiles combine their virtual tiles.

    Args:
        stream: virtual tiles of a rank along each spatial dim; () for none.
    """
    if not stream:
        return shape
    sender, receiver = (
        layout.coarser(stream) if len(layout.boxes) > 1 else layout
        for layout in (shape.sender, shape.receiver)
    )
    return HandoverShape(shape.shape, shape.dtype, sender, receiver)


Passing = dict[Border, dict[Value, HandoverShape]]
"""Shapes of all values by border for a micro-batch, in order."""


def borders(stages: Sequence[nn.Module]) -> dict[Border, tuple[Value, ...]]:
    """All borders that values pass, and the values."""
    return border_values(
        [takes_of(stage) for stage in stages],
        [stage.gives if isinstance(stage, Stage) else () for stage in stages],
    )


def border_values(
    takes: Sequence[Sequence[Value]], gives: Sequence[Sequence[Value]]
) -> dict[Border, tuple[Value, ...]]:
    """Borders from the inputs and outputs of stages; the first one outputs the image, too."""
    borders: dict[Border, tuple[Value, ...]] = {}
    for taker, inputs in enumerate(takes):
        for giver in range(taker):
            outputs = (*gives[giver], IMAGE) if giver == 0 else gives[giver]
            shared = tuple(value for value in inputs if value in outputs)
            if shared:
                borders[Border(giver, taker)] = shared
    return borders


class HandoverShapes:
    """Shapes of what passes each border of a network, from dry runs of its stages.

    Every rank runs copies of the stages without memory, so both sides of a border have the shapes.

    Args:
        stages: all of them.
        image_size: global (channels, *spatial).
        dtype: of the images.
        mixed: the device of the stages and the dtype of autocast, if enabled.

    Attributes:
        image_size: as given.
        stages: copies without memory of all but the last, which sends nothing; in evaluation.
        borders: all borders that values pass, and the values.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        placement: Placement,
        image_size: tuple[int, ...],
        dtype: torch.dtype,
        mixed: tuple[torch.device, torch.dtype] | None = None,
    ) -> None:
        self.stages = [meta_copy(stage) for stage in stages[:-1]]
        self._first, self.borders = stages[0], borders(stages)
        self._placement, self.image_size, self._dtype = placement, image_size, dtype
        self._found: dict[int, tuple[Passing, list[dict[Value, Tensor]]]] = {}
        self._mixed = mixed
        self._types: dict[Value, torch.dtype] = {}

    def of(self, samples: int) -> Passing:
        """Shapes by border for a micro-batch of `samples`."""
        return self._dry_run(samples)[0]

    def arriving(self, samples: int) -> list[dict[Value, Tensor]]:
        """Inputs of each stage for a micro-batch as its first rank gets them, without data."""
        return self._dry_run(samples)[1]

    def _dry_run(self, samples: int) -> tuple[Passing, list[dict[Value, Tensor]]]:
        if samples not in self._found:
            if isinstance(self._first, Stage):
                for own in {samples, *own_counts(self._placement, samples)}:
                    self._first.prepare(own)

            def run(number: int, values: dict[Value, Tensor]) -> dict[Value, Any]:
                return run_stage(self.stages[number], values, samples)

            with torch.no_grad(), on_meta():
                passing, arrived = self.walk(samples, run)
            self._found[samples] = self._typed(passing, samples), arrived
        return self._found[samples]

    def walk(
        self, samples: int, run: Callable[[int, dict[Value, Tensor]], dict[Value, Any]]
    ) -> tuple[Passing, list[dict[Value, Tensor]]]:
        """Hand a micro-batch on from stage to stage, on the meta device.

        Args:
            run: maps the number of a stage and its inputs, as its first rank gets them, to its
                outputs; called for all but the last.

        Returns:
            The shapes by border, and the inputs of each stage.

        Raises:
            ValueError: if an output cannot pass a border.
        """
        passing: Passing = {}
        image = torch.empty(samples, *self.image_size, dtype=self._dtype, device="meta")
        grids = self._placement.tile_grids
        layout = Layout.even(samples, self.image_size[1:], grids[0])
        arrived: list[dict[Value, Tensor]] = [{} for _ in grids]
        arrived[0][IMAGE] = _meta_input(image, layout, grids[0])
        for giver in range(len(self.stages)):
            outputs = arrived[giver] | run(giver, arrived[giver])
            for border in (border for border in self.borders if border.giver == giver):
                passing[border] = {
                    value: _handover_shape(outputs[value], border, self._placement, samples)
                    for value in self.borders[border]
                }
                arrived[border.taker] |= {
                    value: _arrived(shape, grids[border.taker])
                    for value, shape in passing[border].items()
                }
        return passing, arrived

    def _typed(self, passing: Passing, samples: int) -> Passing:
        if self._mixed is None or not self.borders:
            return passing
        if not self._types:
            image = torch.empty((samples, *self.image_size), dtype=self._dtype, device="meta")
            self._types = value_types(self.stages, image, *self._mixed)
        return {
            border: {
                value: replace(part, dtype=self._types[value]) for value, part in values.items()
            }
            for border, values in passing.items()
        }


def divide_stage(
    module: nn.Module,
    comm: Communicator,
    inputs: dict[Value, Tensor],
    samples: int,
    plan: Plan = MappingProxyType({}),
) -> None:
    """Divide the weights of a stage by channels, and keep the part of this rank.

    Args:
        comm: the tensor axis.
        inputs: of the stage, without data.
        plan: see `channels.weights.check_plan`.

    Raises:
        UnsupportedSpatialOp: if the stage cannot be run without data.
        ValueError: if a layer cannot be divided as planned.
    """
    run = partial(run_stage, values=inputs, samples=samples)
    divide(module, uses_of(module, comm, run, plan), comm)


def own_samples(placement: Placement, stage: int, part: int, samples: int) -> range:
    """The samples of a micro-batch that a rank of a stage works on."""
    parts = placement.batch_parts(stage)
    if parts == 1:
        return range(samples)
    bounds = even_bounds(samples, parts)
    return range(bounds[part], bounds[part + 1])


def own_counts(placement: Placement, samples: int) -> set[int]:
    """Non-zero numbers of samples that ranks may have."""
    counts = {
        len(own_samples(placement, stage, part, samples))
        for stage in range(placement.stages)
        for part in range(placement.batch_parts(stage))
    }
    return counts - {0}


def _arrived(part: HandoverShape, grid: tuple[int, ...]) -> Tensor:
    if isinstance(part, SplitShape):
        shape = part.shape if prod(grid) == 1 else part.local_shape(part.receiver, 0)
        image = torch.empty(shape, dtype=part.dtype, device="meta")
        return part.stage_input(dry_mesh(grid), image)
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
                f"{border.taker}, whose ranks hold some of {samples} samples each: its first dim "
                "must be the samples; choose another place by parallel.cut"
            )
        parts = 1, 1
    rows = shape[0] if shape else 1
    grids = placement.tile_grids[border.giver], placement.tile_grids[border.taker]
    is_map = len(shape) == placement.dims + 2 and prod(shape[2:]) > 1
    sender = None
    if isinstance(output, SpatialTensor) and not output.spatial_dims.is_image:
        _check_dims(output, border, samples)
        return SplitShape.of(output, _receiver(output.spatial_layout, parts, grids))
    if isinstance(output, SpatialTensor):
        sender = output.spatial_layout
    elif is_map and prod(grids[0]) == 1 and prod(grids[1]) > 1:
        sender = Layout.by_sample(rows, shape[2:], parts[0])
    if sender is None:
        size = (prod(shape[1:]),)
        sender, receiver = (Layout.by_sample(rows, size, n) for n in parts)
    else:
        receiver = _receiver(sender, parts, grids)
        if parts[1] == 1:
            _check_size(receiver, grids[1], border)
    return HandoverShape(shape, output.dtype, sender, receiver)


def _receiver(sender: Layout, parts: tuple[int, int], grids: tuple[tuple[int, ...], ...]) -> Layout:
    """Layout on the receiving stage of a tensor with layout `sender` on the sending one."""
    if parts[1] > 1:
        return Layout.by_sample(sender.samples, sender.size, parts[1])
    is_same = grids[0] == grids[1] and parts[0] == 1
    return sender if is_same else Layout.even(sender.samples, sender.size, grids[1])


def _check_dims(output: SpatialTensor, border: Border, samples: int) -> None:
    if output.dim() < 2 or output.shape[0] != samples or -output.dim() in output.spatial_dims.at:
        raise ValueError(
            f"a split tensor of {tuple(output.shape)}{output.spatial_dims.describe()} would pass "
            f"between stages {border.giver} and {border.taker}: its first dim must be the "
            f"{samples} samples; choose another place by parallel.cut"
        )


def _check_size(layout: Layout, grid: tuple[int, ...], border: Border) -> None:
    if any(extent < parts for extent, parts in zip(layout.size, grid, strict=True)):
        raise ValueError(
            f"stage {border.taker} would cut images of {by(layout.size)} into {by(grid)} tiles: "
            f"take parallel.spatial_stages={border.taker}, a smaller parallel.grid, or earlier "
            "places by parallel.cut"
        )
