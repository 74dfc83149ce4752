"""What passes between stages, found out without data and without talking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.comm.handover import HandoverShape
from spatialdl.layout import Layout
from spatialdl.mesh import Placement, dry_mesh
from spatialdl.pipeline.recording import IMAGE, Value, meta_copy
from spatialdl.pipeline.stage import Stage, run_stage, takes_of
from spatialdl.spatial.dims import IMAGE as ROWS_AND_COLUMNS_LAST
from spatialdl.spatial.tensor import SpatialTensor


class Border(NamedTuple):
    """Two stages of which the first gives something to the second, which need not be the next."""

    giver: int
    taker: int


Passing = dict[Border, dict[Value, HandoverShape]]
"""What passes each border for a micro-batch, in order."""


def borders(stages: Sequence[nn.Module]) -> dict[Border, tuple[Value, ...]]:
    """All borders over which something passes, and what."""
    found: dict[Border, tuple[Value, ...]] = {}
    for taker, stage in enumerate(stages):
        for giver in range(taker):
            given = _gives(stages[giver], giver)
            both = tuple(value for value in takes_of(stage) if value in given)
            if both:
                found[Border(giver, taker)] = both
    return found


def _gives(stage: nn.Module, number: int) -> tuple[Value, ...]:
    if not isinstance(stage, Stage):
        return ()
    return (*stage.gives, IMAGE) if number == 0 else stage.gives


class HandoverShapes:
    """What passes each border of a network that is cut into stages.

    Every rank runs copies of the stages without memory, so that both sides of a border know.

    Args:
        stages: all of them.
        image_size: global (channels, H, W).
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        placement: Placement,
        image_size: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        self._stages = [meta_copy(stage) for stage in stages[:-1]]  # nothing follows the last
        self._first, self._borders = stages[0], borders(stages)
        self._placement, self._image_size, self._dtype = placement, image_size, dtype
        self._found: dict[int, Passing] = {}

    def of(self, samples: int) -> Passing:
        """What passes for a micro-batch of `samples`."""
        if samples not in self._found:
            if isinstance(self._first, Stage):
                self._first.prepare(samples)
            self._found[samples] = self._dry_run(samples)
        return self._found[samples]

    @torch.no_grad()
    def _dry_run(self, samples: int) -> Passing:
        found: Passing = {}
        size = (samples, *self._image_size)
        grid = self._placement.grids[0]
        layout = Layout.even((samples, *self._image_size[1:]), grid)
        image = torch.empty(size, dtype=self._dtype, device="meta")
        arrived: list[dict[Value, Tensor]] = [{} for _ in self._placement.grids]
        arrived[0][IMAGE] = _meta_input(image, layout, grid)
        for number, dry in enumerate(self._stages):
            with torch.device("meta"):  # where layers make tensors of their own, too
                given = arrived[number] | run_stage(dry, arrived[number], samples)
            for border, values in self._borders.items():
                if border.giver == number:
                    found[border] = {
                        value: _handover_shape(given[value], border, self._placement)
                        for value in values
                    }
                    grid = self._placement.grids[border.taker]
                    for value, shape in found[border].items():
                        arrived[border.taker][value] = _arrived(shape, grid)
        return found


def _arrived(part: HandoverShape, grid: tuple[int, int]) -> Tensor:
    whole = torch.empty(part.shape, dtype=part.dtype, device="meta")
    return _meta_input(whole, part.receiver, grid)


def _meta_input(x: Tensor, layout: Layout | None, grid: tuple[int, int]) -> Tensor:
    if layout is None or grid == (1, 1):
        return x
    samples, height, width = layout.boxes[0].shape
    tile = x.new_empty((samples, *x.shape[1:-2], height, width))
    return SpatialTensor(tile, layout, dry_mesh(grid))


def _handover_shape(output: Tensor, border: Border, placement: Placement) -> HandoverShape:
    grid, next_grid = placement.grids[border.giver], placement.grids[border.taker]
    sender = receiver = None
    if isinstance(output, SpatialTensor):
        sender = output.spatial_layout
        if output.spatial_dims != ROWS_AND_COLUMNS_LAST:
            raise ValueError(
                f"a split image of {tuple(output.shape)}{output.spatial_dims.describe()} would "
                f"pass between stages {border.giver} and {border.taker}, where rows and columns "
                "come last: choose another place by parallel.cut"
            )
    is_map = output.dim() == 4 and output.shape[-2] * output.shape[-1] > 1
    if sender is not None or (is_map and grid == (1, 1) and next_grid != (1, 1)):
        size = (output.shape[0], output.shape[-2], output.shape[-1])
        sender = sender or Layout.even(size, (1, 1))
        receiver = sender if grid == next_grid else Layout.even(size, next_grid)
        if size[1] < next_grid[0] or size[2] < next_grid[1]:
            raise ValueError(
                f"stage {border.taker} would cut images of {size[1]}x{size[2]} into "
                f"{next_grid[0]}x{next_grid[1]} tiles: take parallel.spatial_stages={border.taker}"
                ", a smaller parallel.grid, or earlier places by parallel.cut"
            )
    return HandoverShape(tuple(output.shape), output.dtype, sender, receiver)
