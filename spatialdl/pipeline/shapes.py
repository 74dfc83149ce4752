"""What passes between stages, found out without data and without talking."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spatialdl.comm.handover import HandoverShape
from spatialdl.layout import Layout
from spatialdl.mesh import Placement, dry_mesh
from spatialdl.pipeline.partition import meta_copy
from spatialdl.spatial.tensor import SpatialTensor


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
        self._placement, self._image_size, self._dtype = placement, image_size, dtype
        self._found: dict[int, list[HandoverShape]] = {}

    def of(self, samples: int) -> list[HandoverShape]:
        """What passes after each stage but the last for a micro-batch of `samples`.

        Raises:
            ValueError: if a stage gives more than one tensor.
        """
        if samples not in self._found:
            self._found[samples] = self._dry_run(samples)
        return self._found[samples]

    @torch.no_grad()
    def _dry_run(self, samples: int) -> list[HandoverShape]:
        shapes: list[HandoverShape] = []
        grids = self._placement.grids
        x: Tensor = torch.empty((samples, *self._image_size), dtype=self._dtype, device="meta")
        layout: Layout | None = Layout.even((samples, *self._image_size[1:]), grids[0])
        for stage, dry in enumerate(self._stages):
            output = dry(_meta_input(x, layout, grids[stage]))
            shapes.append(_handover_shape(output, stage, self._placement))
            x = torch.empty(shapes[-1].shape, dtype=shapes[-1].dtype, device="meta")
            layout = shapes[-1].receiver
        return shapes


def _meta_input(x: Tensor, layout: Layout | None, grid: tuple[int, int]) -> Tensor:
    if layout is None or grid == (1, 1):
        return x
    samples, height, width = layout.boxes[0].shape
    tile = x.new_empty((samples, *x.shape[1:-2], height, width))
    return SpatialTensor(tile, layout, dry_mesh(grid))


def _handover_shape(output: object, stage: int, placement: Placement) -> HandoverShape:
    if not isinstance(output, Tensor):
        raise ValueError(
            f"stage {stage} ends with a {type(output).__name__}: a network can be cut only where "
            "one tensor passes"
        )
    grid, next_grid = placement.grids[stage], placement.grids[stage + 1]
    sender = output.spatial_layout if isinstance(output, SpatialTensor) else None
    receiver = None
    is_map = output.dim() == 4 and output.shape[-2] * output.shape[-1] > 1
    if sender is not None or (is_map and grid == (1, 1) and next_grid != (1, 1)):
        size = (output.shape[0], output.shape[-2], output.shape[-1])
        sender = sender or Layout.even(size, (1, 1))
        receiver = sender if grid == next_grid else Layout.even(size, next_grid)
    return HandoverShape(tuple(output.shape), output.dtype, sender, receiver)
